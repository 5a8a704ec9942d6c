"""The timed cases of `device_bench`: our kernels and peers on the same work.

A peer is what a user would run who wants no equal bits: `dot_product_attention`
(on GPU cuDNN's, where it is accepted), `ragged_dot`, XLA's own product, plain
`jnp` for the row operations, `log_softmax` of all logits. Block-sparse attention
has no counterpart; its peer reads all pages. Backward peers are their gradients;
that of the head computes the logits again, as ours does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import numerics as nx
from kernels_pallas.block_selection import ops as selection
from kernels_pallas.fp8_matmul import ops as fp8
from kernels_pallas.grouped_matmul import ops as grouped
from kernels_pallas.logprob_head import ops as head
from kernels_pallas.matmul import ops as dense
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.paged_attention import ops as attention
from kernels_pallas.row_ops import ops as rows


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Shapes of the timed cases.

  Attributes:
    tokens: T of all cases but decode.
    row_tokens: of one packed row; attention sees no further.
    width: D.
    hidden: F of the dense and FP8 products.
    experts: E; a token has two.
    expert_width: F of an expert.
    vocab: V.
    heads: N.
    kv_heads: K.
    head_width: H.
    page: C.
    window: of a sliding window.
    topk: pages that block-sparse attention selects.
    sequences: of decode.
    context: tokens of each of them.
    call_s: seconds of one timed call.
    calls: timed calls.
  """

  tokens: int
  row_tokens: int
  width: int
  hidden: int
  experts: int
  expert_width: int
  vocab: int
  heads: int
  kv_heads: int
  head_width: int
  page: int
  window: int
  topk: int
  sequences: int
  context: int
  call_s: float
  calls: int


LARGE = Sizes(
    tokens=8192,
    row_tokens=2048,
    width=2048,
    hidden=8192,
    experts=8,
    expert_width=1024,
    vocab=32768,
    heads=16,
    kv_heads=4,
    head_width=128,
    page=128,
    window=512,
    topk=4,
    sequences=64,
    context=2048,
    call_s=0.05,
    calls=5,
)
SMALL = Sizes(
    tokens=256,
    row_tokens=128,
    width=64,
    hidden=128,
    experts=4,
    expert_width=32,
    vocab=512,
    heads=4,
    kv_heads=2,
    head_width=16,
    page=16,
    window=32,
    topk=2,
    sequences=8,
    context=64,
    call_s=0.005,
    calls=3,
)


@dataclasses.dataclass(frozen=True)
class Program:
  """One side of a case.

  Attributes:
    name: for the table.
    fun: the work; its first argument is a float array.
    args: of it.
    wrt: 0 for `fun` itself; else its gradient by so many first arguments.
  """

  name: str
  fun: Callable[..., Any]
  args: Sequence[Any]
  wrt: int = 0

  def ready(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what is timed and its arguments; runs the forward if need be."""
    if not self.wrt:
      return self.fun, tuple(self.args)

    def forward(by, rest):
      return jax.vjp(lambda *by: self.fun(*by, *rest), *by)

    by, rest = tuple(self.args[: self.wrt]), tuple(self.args[self.wrt :])
    out, pull = nx.jit(forward)(by, rest)
    g = jax.tree.map(jnp.ones_like, out)
    if not isinstance(g, tuple):
      return (lambda g, pull: pull(g)), (g, pull)
    return (lambda first, more, pull: pull((first, *more))), (g[0], g[1:], pull)


@dataclasses.dataclass(frozen=True)
class Work:
  """A case.

  Attributes:
    ours: our side.
    peers: others that do the same work, best first; the first that the compiler
      takes counts.
    flops: see the module.
    shape: in words.
  """

  ours: Program
  peers: Sequence[Program]
  flops: float
  shape: str


_NUMERICS = nx.Numerics('bfloat16')


def _normal(seed: int, shape: Sequence[int], scale: float = 1.0):
  return _NUMERICS.cast(jax.random.normal(jax.random.key(seed), shape) * scale)


def _attention_peers() -> tuple[str, ...]:
  return ('cudnn', 'xla') if nx.platform() == 'gpu' else ('xla',)


def _attend(q, kv, layout, selected=None, window=None):
  return attention.paged_attention(
      q, kv, layout, numerics=_NUMERICS, window=window, selected_TKj=selected
  )


def _attention(kind: str, backward: bool = False):
  """Returns the case of 'causal', 'window' or 'block' attention."""

  def case(sizes: Sizes) -> Work:
    s, length = sizes, sizes.row_tokens
    count = s.tokens // length
    window = s.window if kind == 'window' else None
    q, kv, layout = _rows_of_attention(s)
    seen = np.minimum(np.arange(length) + 1, window or length)
    shape = f'{count}x{length} tokens, {s.heads}/{s.kv_heads} x {s.head_width}'
    args, all_pages = [q, kv, layout], ''
    if kind == 'window':
      shape += f', window {window}'
    if kind == 'block':
      args.append(nx.jit(functools.partial(_pages, s))(*args))
      past, own = np.divmod(np.arange(length), s.page)
      seen = own + 1 + np.minimum(past, s.topk) * s.page
      shape += f', {s.topk} pages of {s.page}'
      all_pages = ' of all pages'
    row = lambda x: x.reshape(count, length, -1, s.head_width)
    kv = kv.reshape(s.tokens, s.kv_heads, 2, s.head_width)
    split = [row(q), row(kv[:, :, 0]), row(kv[:, :, 1])]

    def peer(name):
      return lambda q, k, v: jax.nn.dot_product_attention(
          q,
          k,
          v,
          is_causal=True,
          local_window_size=window and (window - 1, 0),
          implementation=name,
      )

    pair = (10 if backward else 4) * s.heads * s.head_width
    return Work(
        Program(
            'ours',
            functools.partial(_attend, window=window),
            args,
            2 if backward else 0,
        ),
        [
            Program(
                f'dot_product_attention{all_pages}, {name}',
                peer(name),
                split,
                3 if backward else 0,
            )
            for name in _attention_peers()
        ],
        float(pair * count * seen.sum()),
        shape,
    )

  return case


def _rows_of_attention(s: Sizes):
  """Returns queries, pages and the layout of packed rows."""
  q = _normal(0, (s.tokens, s.heads, s.head_width))
  pages = s.tokens // s.page, s.page
  kv = _normal(1, (*pages, s.kv_heads, 2 * s.head_width))
  positions = jnp.arange(s.row_tokens, dtype=jnp.int32)
  positions = jnp.tile(positions, (s.tokens // s.row_tokens, 1))
  return q, kv, layouts.row_layout(positions, s.page)


def _decode(s: Sizes) -> Work:
  """One token of every sequence of the engine."""
  n, tile, per = s.sequences, layouts.QUERY_TILE, s.context // s.page
  q = _normal(0, (n, s.heads, s.head_width))
  kv = _normal(1, (n * per, s.page, s.kv_heads, 2 * s.head_width))
  numbers = jnp.arange(n, dtype=jnp.int32)
  table = jax.random.permutation(jax.random.key(2), n * per).reshape(n, per)
  tiles = jnp.full((n, tile), n, jnp.int32)
  layout = layouts.Layout(
      jnp.full(n, s.context - 1, jnp.int32),
      numbers,
      table,
      tiles.at[:, (s.context - 1) % tile].set(numbers),
      numbers * tile + (s.context - 1) % tile,
  )
  # The peer's keys lie in their order already.
  split = kv[table].reshape(n, s.context, s.kv_heads, 2, s.head_width)
  args = [q[:, None], split[:, :, :, 0], split[:, :, :, 1]]
  return Work(
      Program('ours', _attend, [q, kv, layout]),
      [
          Program(
              f'dot_product_attention, {name}',
              functools.partial(
                  jax.nn.dot_product_attention, implementation=name
              ),
              args,
          )
          for name in _attention_peers()
      ],
      4.0 * n * s.context * s.heads * s.head_width,
      f'{n} sequences of {s.context} tokens',
  )


def _pages(s: Sizes, q, kv, layout):
  """Selects pages with our kernels."""
  return selection.select_pages(
      q,
      selection.page_means(kv, numerics=_NUMERICS),
      layout,
      page_size=s.page,
      topk=s.topk,
      numerics=_NUMERICS,
  )


def _select(s: Sizes) -> Work:
  q, kv, layout = _rows_of_attention(s)
  count, pages = s.tokens // s.row_tokens, s.row_tokens // s.page

  def peer(q, kv):
    k = kv[..., : s.head_width].astype(jnp.float32)
    means = k.mean(1).reshape(count, pages, s.kv_heads, -1).astype(q.dtype)
    q = q.reshape(count, s.row_tokens, s.kv_heads, -1, s.head_width)
    scores = jnp.einsum('btkgh,bmkh->btkm', q, means)
    past = jnp.arange(pages) < jnp.arange(s.row_tokens)[:, None] // s.page
    scores = jnp.where(past[:, None], scores, -jnp.inf)
    best, number = jax.lax.top_k(scores, s.topk)
    return jnp.where(best > -jnp.inf, number, -1)

  pairs = float((np.arange(s.row_tokens) // s.page).sum() * count)
  return Work(
      Program('ours', functools.partial(_pages, s), [q, kv, layout]),
      [Program('mean, einsum, top_k', peer, [q, kv])],
      2 * pairs * s.heads * s.head_width,
      f'{s.tokens} tokens, {s.topk} of {pages} pages',
  )


def _product(x, w):
  return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _dense(quantized: bool, backward: bool = False):
  """Returns the case of a dense product, of bfloat16 or of e4m3 numbers."""

  def case(s: Sizes) -> Work:
    args = [
        _normal(0, (s.tokens, s.width)),
        _normal(1, (s.width, s.hidden), s.width**-0.5),
    ]
    product = fp8.fp8_matmul if quantized else dense.matmul
    fun = functools.partial(product, numerics=_NUMERICS)
    wrt = 2 if backward else 0
    flops = 2.0 * s.tokens * s.width * s.hidden
    return Work(
        Program('ours', fun, args, wrt),
        [Program('XLA dot of bfloat16', _product, args, wrt)],
        2 * flops if backward else flops,
        f'{s.tokens}x{s.width}x{s.hidden}',
    )

  return case


def _grouped(backward: bool):
  def case(s: Sizes) -> Work:
    chosen = jax.random.uniform(jax.random.key(2), (s.tokens, s.experts))
    chosen = jnp.argsort(chosen, -1)[:, :2].astype(jnp.int32)
    plan = nx.jit(grouped.plan, static_argnums=1)(chosen, s.experts)
    x = _normal(0, (s.tokens, s.width))
    w = _normal(1, (s.experts, s.width, s.expert_width), s.width**-0.5)
    sizes = jnp.bincount(chosen.reshape(-1), length=s.experts)
    sizes = sizes.astype(jnp.int32)
    sorted_x = x[jnp.argsort(chosen.reshape(-1), stable=True) // 2]
    wrt = 2 if backward else 0

    def peer(x, w, sizes):
      return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)

    def ours(x, w, plan):
      return grouped.grouped_matmul(x, w, plan, numerics=_NUMERICS)

    return Work(
        Program('ours', ours, [grouped.dispatch(x, plan), w, plan], wrt),
        [Program('ragged_dot', peer, [sorted_x, w, sizes], wrt)],
        (8.0 if backward else 4.0) * s.tokens * s.width * s.expert_width,
        f'{2 * s.tokens}x{s.width}x{s.expert_width}, {s.experts} experts',
    )

  return case


def _row_case(ours, peer, args, shape: str) -> Work:
  return Work(
      Program('ours', ours, args), [Program('XLA', peer, args)], 0, shape
  )


def _rms_norm(s: Sizes) -> Work:
  def peer(x, gain):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return (y * gain.astype(jnp.float32)).astype(x.dtype)

  args = [_normal(0, (s.tokens, s.width)), _normal(1, (s.width,))]
  fun = functools.partial(rows.rms_norm, numerics=_NUMERICS)
  return _row_case(fun, peer, args, f'{s.tokens}x{s.width}')


def _rope(s: Sizes) -> Work:
  def peer(x, positions):
    half = s.head_width // 2
    wave = 1e4 ** (-jnp.arange(half) / half)
    angle = (positions[:, None] * wave)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.astype(x.dtype)

  x = _normal(0, (s.tokens, s.heads, s.head_width))
  args = [x, jnp.arange(s.tokens, dtype=jnp.int32)]
  fun = functools.partial(rows.rope, numerics=_NUMERICS)
  return _row_case(fun, peer, args, f'{s.tokens}x{s.heads}x{s.head_width}')


def _swiglu(s: Sizes) -> Work:
  def peer(gate, up):
    y = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return y.astype(gate.dtype)

  args = [_normal(i, (s.tokens, s.hidden)) for i in (0, 1)]
  fun = functools.partial(rows.swiglu, numerics=_NUMERICS)
  return _row_case(fun, peer, args, f'{s.tokens}x{s.hidden}')


def _router(s: Sizes) -> Work:
  def peer(logits, bias):
    _, experts = jax.lax.top_k(logits + bias, 2)
    chosen = jnp.take_along_axis(logits, experts, -1)
    return jax.nn.softmax(chosen, -1), experts

  logits = jax.random.normal(jax.random.key(0), (s.tokens, s.experts))
  args = [logits, jnp.zeros(s.experts)]
  fun = functools.partial(
      rows.router, topk=2, gating='softmax', numerics=_NUMERICS
  )
  return _row_case(fun, peer, args, f'{s.tokens}x{s.experts}')


def _head(backward: bool):
  def case(s: Sizes) -> Work:
    args = [
        _normal(0, (s.tokens, s.width)),
        _normal(1, (s.width, s.vocab), s.width**-0.5),
        jax.random.randint(jax.random.key(2), (s.tokens,), 0, s.vocab),
    ]

    def ours(x, w, targets):
      return head.logprobs(x, w, targets, temperature=1.0, numerics=_NUMERICS)

    @jax.checkpoint
    def peer(x, w, targets):
      z = jax.nn.log_softmax(_product(x, w), -1)
      logp = jnp.take_along_axis(z, targets[:, None], -1)[:, 0]
      return logp, -(jnp.exp(z) * z).sum(-1)

    wrt = 2 if backward else 0
    return Work(
        Program('ours', ours, args, wrt),
        [Program('log_softmax of all logits', peer, args, wrt)],
        (6.0 if backward else 2.0) * s.tokens * s.width * s.vocab,
        f'{s.tokens}x{s.width}x{s.vocab}',
    )

  return case


# Gradients last: on the XLA path they take longest to compile.
CASES: dict[str, Callable[[Sizes], Work]] = {
    'matmul': _dense(False),
    'fp8_matmul': _dense(True),
    'grouped_matmul': _grouped(False),
    'rms_norm': _rms_norm,
    'rope': _rope,
    'swiglu': _swiglu,
    'router': _router,
    'attention decode': _decode,
    'attention window': _attention('window'),
    'attention causal': _attention('causal'),
    'block selection': _select,
    'attention block-sparse': _attention('block'),
    'logprobs': _head(False),
    'grouped_matmul backward': _grouped(True),
    'logprobs backward': _head(True),
    'attention window backward': _attention('window', True),
    'attention block-sparse backward': _attention('block', True),
    'attention causal backward': _attention('causal', True),
}
