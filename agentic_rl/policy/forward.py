"""The one forward: a stream of tokens in, final hidden rows and routes out.

Sampler and learner both call `forward`. The sampler passes few tokens and a
long-lived pool of KV pages; the learner passes packed rows and no pool, and its
pages are the stream itself. See `kernels_pallas.numerics` for the rules that
make the two equal to the bit.
"""

from __future__ import annotations

import functools
from typing import Any, Mapping, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from agentic_rl.parallel import mesh
from agentic_rl.policy import model
from agentic_rl.policy import routing
from agentic_rl.policy.config import PolicyConfig
from kernels_pallas.block_selection import ops as selection
from kernels_pallas.fp8_matmul import ops as fp8
from kernels_pallas.grouped_matmul import ops as grouped
from kernels_pallas.matmul import ops as dense
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.paged_attention import ops as attention
from kernels_pallas.row_ops import ops as rows


class Pool(NamedTuple):
  """KV pages of all layers; layer l owns pages l·M .. (l+1)·M - 1.

  Attributes:
    kv: [L·M, C, K·2H] keys and values, the last page of a layer is a bin for
      writes that must not land. Heads lie side by side, as the TPU's kernels
      read them: with an axis of their own XLA would copy the pool.
    means: float32 [L·M, K, H] mean key of each full page.
  """

  kv: jax.Array
  means: jax.Array


class Writes(NamedTuple):
  """Where a step's keys go.

  Attributes:
    page_T: int32, page of each token within a layer.
    offset_T: int32, place in the page.
    full: int32 [n], pages that this step completes, the bin page for none.
  """

  page_T: jax.Array
  offset_T: jax.Array
  full: jax.Array


def init_pool(cfg: PolicyConfig, pages: int) -> Pool:
  """Returns an empty pool of `pages` usable pages a layer, and one bin."""
  n = cfg.layers * (pages + 1)
  shape = (n, cfg.page, cfg.kv_heads * 2 * cfg.head_width)
  means = jnp.zeros((n, cfg.kv_heads, cfg.head_width))
  return Pool(jnp.zeros(shape, cfg.numerics.storage), means)


def forward(
    weights: dict[str, Any],
    tokens_T,
    layout: attention.Layout | Mapping[str, attention.Layout],
    cfg: PolicyConfig,
    pool: Pool | None = None,
    writes: Writes | None = None,
    parallel: mesh.Parallel = mesh.SINGLE,
    replay: routing.Routes | None = None,
    route_weights: bool = False,
):
  """Runs the decoder over a stream of tokens.

  On a mesh it runs within `parallel.map`, on this device's stream.

  Args:
    weights: from `model.init`; on a mesh this device's parts.
    tokens_T: int32 [T], T a multiple of the row tile.
    layout: positions, page table and tiles of the stream; or one for each kind
      of layer, from `row_layouts`.
    cfg: shape of the policy.
    pool: KV pages of the sampler; None in the learner, where the stream is rows
      and its keys are the pages.
    writes: where the stream's keys go; with `pool` only.
    parallel: the mesh.
    replay: recorded routes [L_moe, T, topk] that take the place of the routers'
      choice.
    route_weights: whether to return the experts' weights beside them.

  Returns:
    Hidden rows [T, D] after the final norm, the routers' choice int32
    [L_moe, T, topk] in slot order (with its weights: `routing.Routes`), and the
    pool.
  """
  num = cfg.numerics
  if isinstance(layout, attention.Layout):
    layout = dict.fromkeys(cfg.pattern, layout)
  logical = model.logical_axes(cfg)
  embedding = parallel.gather(weights['embedding'], logical['embedding'])
  x = num.cast(embedding[tokens_T])
  routes = []
  layer = functools.partial(
      _layer,
      layout=layout,
      cfg=cfg,
      writes=writes,
      parallel=parallel,
      weigh=route_weights,
  )
  if cfg.remat:
    layer = jax.checkpoint(layer, static_argnums=(4,))
  for i in range(cfg.dense_layers):
    x, pool, _ = layer(x, pool, weights['first'][i], i, ('first', i))

  def group(carry, args):
    x, pool = carry
    stack, g, known = args
    chosen = []
    for i in range(len(cfg.pattern)):
      index = cfg.dense_layers + g * len(cfg.pattern) + i
      given = jax.tree.map(lambda a, i=i: a[i], known)
      x, pool, experts = layer(x, pool, stack[i], index, ('pattern', i), given)
      chosen.append(experts)
    return (x, pool), jax.tree.map(lambda *a: jnp.stack(a), *chosen)

  if cfg.groups:
    stacks = [weights['pattern'][i] for i in range(len(cfg.pattern))]
    by_group = lambda a: a.reshape(cfg.groups, -1, *a.shape[1:])
    known = jax.tree.map(by_group, replay)
    scanned = (stacks, jnp.arange(cfg.groups), known)
    (x, pool), routes = lax.scan(group, (x, pool), scanned)
    routes = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), routes)
  if not cfg.moe_layers:
    routes = routing.empty(tokens_T.shape[0], cfg, route_weights)
  norm = parallel.gather(weights['final_norm'], logical['final_norm'])
  x = rows.rms_norm(x, norm, numerics=num, impl=cfg.impl)
  return x, routes, pool


def head(weights, cfg: PolicyConfig, parallel: mesh.Parallel = mesh.SINGLE):
  """Returns the [D, V] matrix of the LM head."""
  name = 'embedding' if cfg.tied else 'head'
  whole = parallel.gather(weights[name], model.logical_axes(cfg)[name])
  return whole.T if cfg.tied else whole


def row_layouts(positions_BT, cfg: PolicyConfig, parallel: mesh.Parallel):
  """Returns the layout of the learner's rows, as `forward` takes it.

  Args:
    positions_BT: int32 [B, T] of whole rows, of which a device of the context
      axis holds a part.
    cfg: shape of the policy.
    parallel: the mesh.
  """
  parts = parallel.size('context')
  if parts == 1:
    return layouts.row_layout(positions_BT, cfg.page)
  length = positions_BT.shape[1]
  whole = length - length // parts
  window = -(-max(cfg.window - 1, 0) // cfg.page) * cfg.page
  if cfg.sink_page:  # the first page may be anywhere
    window = whole
  past = {'w': min(window, whole), 'b': whole, 'f': whole}
  return {
      kind: layouts.part_layout(
          positions_BT, cfg.page, parallel.part(), parts, past[kind]
      )
      for kind in cfg.pattern
  }


def _layer(
    x, pool, w, index, place, given=None, *,
    layout, cfg, writes, parallel, weigh,
):  # fmt: skip
  num, impl = cfg.numerics, cfg.impl
  name, i = place
  kind = cfg.pattern[i % len(cfg.pattern)]
  w = parallel.gather(w, _layer_axes(cfg, name, i))
  h = rows.rms_norm(x, w['attention_norm'], numerics=num, impl=impl)
  out, pool = _attention(
      h, pool, w, index, kind, layout[kind], cfg, writes, parallel
  )
  x = num.cast(x + num.keep(_project(out, w['output'], cfg)))
  h = rows.rms_norm(x, w['ffn_norm'], numerics=num, impl=impl)
  out, experts = _feed_forward(h, w, cfg, parallel, given, weigh)
  return num.cast(x + num.keep(out)), pool, experts


def _layer_axes(cfg, name: str, i: int) -> dict[str, Any]:
  """Returns the logical axes of one layer, the stack's axis left out."""
  axes = model.logical_axes(cfg)[name][i]
  return {k: v[1:] if name == 'pattern' else v for k, v in axes.items()}


def _project(x, w, cfg):
  num = cfg.numerics
  product = fp8.fp8_matmul if num.quantized else dense.matmul
  return num.cast(product(x, w, numerics=num, impl=cfg.impl))


def _attention(h, pool, w, index, kind, layout, cfg, writes, parallel):
  num, impl = cfg.numerics, cfg.impl
  count, width = h.shape[0], cfg.head_width
  q = _project(h, w['query'], cfg).reshape(count, cfg.heads, width)
  kv = _project(h, w['key_value'], cfg)
  kv = kv.reshape(count, cfg.kv_heads, 2 * width)

  def place(a, gain):
    a = rows.rms_norm(a, gain, numerics=num, impl=impl)
    theta = cfg.rope_theta
    return rows.rope(
        a, layout.positions_T, numerics=num, theta=theta, impl=impl
    )

  q = place(q, w['query_norm'])
  k = place(kv[..., :width], w['key_norm'])
  kv = jnp.concatenate([k, kv[..., width:]], -1)
  if pool is None:
    pages = kv.reshape(-1, cfg.page, cfg.kv_heads, 2 * width)
    means = None
    if kind == 'b':
      means = selection.page_means(pages, numerics=num, impl=impl)
    if layout.key_starts_BS is not None:
      pages, means = _with_past(pages, means, layout, parallel)
  else:
    pool = _write(pool, kv, kind, index, cfg, writes)
    pages, means = _by_head(pool.kv, cfg), pool.means
    layout = layout.shift_pages(index * (pages.shape[0] // cfg.layers))
  selected = None
  if kind == 'b':
    selected = selection.select_pages(
        q,
        means,
        layout,
        page_size=cfg.page,
        topk=min(cfg.topk_pages, cfg.pages_per_sequence),
        numerics=num,
        impl=impl,
    )
  out = attention.paged_attention(
      q,
      pages,
      layout,
      numerics=num,
      window=cfg.window if kind == 'w' else None,
      selected_TKj=selected,
      sink_N=w.get('sink'),
      soft_cap=cfg.soft_cap,
      sink_page=cfg.sink_page,
      impl=impl,
  )
  return out.reshape(count, -1), pool


def _with_past(pages, means, layout, parallel):
  """Puts the pages before this device's part of each row before them."""
  rows_, keys = layout.key_starts_BS.shape
  past = (keys - layout.row_length) // pages.shape[1]

  def extend(x):
    x = x.reshape(rows_, -1, *x.shape[1:])
    x = parallel.past(x, past)
    return x.reshape(-1, *x.shape[2:])

  return extend(pages), None if means is None else extend(means)


def _write(pool, kv, kind, index, cfg, writes):
  first = index * (pool.kv.shape[0] // cfg.layers)
  rows = kv.reshape(kv.shape[0], -1)
  stored = pool.kv.at[first + writes.page_T, writes.offset_T].set(rows)
  if kind != 'b':
    return Pool(stored, pool.means)
  full = first + writes.full
  means = selection.page_means(
      _by_head(stored[full], cfg), numerics=cfg.numerics, impl=cfg.impl
  )
  return Pool(stored, pool.means.at[full].set(means))


def _by_head(pages, cfg):
  """[M, C, K·2H] -> [M, C, K, 2H]."""
  return pages.reshape(*pages.shape[:2], cfg.kv_heads, -1)


def _feed_forward(h, w, cfg, parallel, given, weigh):
  num, impl = cfg.numerics, cfg.impl
  out, experts = None, None
  if 'dense_in' in w:
    a = _project(h, w['dense_in'], cfg)
    half = a.shape[1] // 2
    a = rows.swiglu(a[:, :half], a[:, half:], numerics=num, impl=impl)
    out = _project(a, w['dense_out'], cfg)
  if 'router' in w:
    logits = dense.matmul(h, w['router'], numerics=num, impl=impl)
    weights, used, experts = routing.route(logits, w['balance'], given, cfg)
    mixed = _experts(h, weights, used, w, cfg, parallel)
    if weigh:
      experts = routing.Routes(experts, weights)
    out = mixed if out is None else num.cast(out + num.keep(mixed))
  return out, experts


def _experts(h, weights_Tk, experts_Tk, w, cfg, parallel):
  """Returns the weighted sum of each token's experts."""
  num, devices = cfg.numerics, parallel.expert_devices
  if devices == 1:
    plan = grouped.plan(experts_Tk, cfg.experts)
    a = _expert_rows(h, plan, w, cfg)
    return num.cast(grouped.combine(a, weights_Tk, plan, numerics=num))
  # A slot travels to the device of its expert, keeps its place, and returns.
  own = cfg.experts // devices
  device = jnp.arange(devices)[:, None, None]
  here = experts_Tk // own == device  # [devices, T, k]
  number = jnp.where(here, experts_Tk - device * own, own)
  x = jnp.where(here[..., None], h[:, None], jnp.zeros((), h.dtype))
  number, x = parallel.exchange(number), parallel.exchange(x)
  plan = grouped.plan(number.reshape(-1, 1), own)
  a = _expert_rows(x.reshape(-1, x.shape[-1]), plan, w, cfg)
  a = parallel.exchange(grouped.slots(a, plan).reshape(x.shape))
  a = jnp.take_along_axis(a, (experts_Tk // own)[None, ..., None], 0)[0]
  return num.cast(grouped.combine_slots(a, weights_Tk, numerics=num))


def _expert_rows(x, plan, w, cfg):
  num, impl = cfg.numerics, cfg.impl
  product = functools.partial(
      fp8.fp8_grouped_matmul if num.quantized else grouped.grouped_matmul,
      plan_=plan,
      numerics=num,
      impl=impl,
  )
  a = num.cast(product(grouped.dispatch(x, plan), w['expert_in']))
  half = a.shape[1] // 2
  a = rows.swiglu(a[:, :half], a[:, half:], numerics=num, impl=impl)
  return num.cast(product(a, w['expert_out']))
