"""Gradient of paged attention on packed rows, for TPU.

The grid walks the tiles of a row in order while the keys of one KV head and
their float32 gradients stay in VMEM: no atomics, one fixed order of additions,
five products a page. A tile's dQ is finished in its own step.

  P = exp(S - lse),  dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)),
  dQ = dS K / √H,  dK = dSᵀ Q / √H.   Source: arXiv:2205.14135 alg. 4.

A soft cap, s = cap · tanh(S / cap), multiplies dS by 1 - tanh².
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import pallas_tpu as forward
from kernels_pallas.paged_attention.layout import tile_facts
from kernels_pallas.paged_attention.visits import visits

# Keys in bfloat16 and gradients in float32 of one row and head, twice each.
ROW_BYTES = 96 << 20
SLIDE_TOKENS = 128  # tokens of one grid step of a sliding window
AT_ONCE = 4  # pages of a list that are visited in one step

_BY_ROWS = (((1,), (0,)), ((), ()))  # cr, rh -> ch


def attend_rows_backward(
    q_TNH,
    kv_MCKh,
    layout,
    selected_TKj,
    out_TNH,
    lse_TN,
    g_TNH,
    form,
    numerics,
):
  """Returns dq [T, N, H] and dkv [M, C, K, 2H] of `ops.paged_attention`.

  Args:
    q_TNH: queries.
    kv_MCKh: keys and values; the pages are the rows.
    layout: of the rows.
    selected_TKj: selected pages, or None.
    out_TNH: the output.
    lse_TN: log-sum-exp of the scores.
    g_TNH: gradient of the output.
    form: window, soft cap and sink page.
    numerics: precision of the products.

  Raises:
    ValueError: if a row is too long for the chip's VMEM.
  """
  page, heads, both = kv_MCKh.shape[1:]
  group = q_TNH.shape[1] // heads
  shape = forward._Shape(page, heads, both // 2, group, numerics, form)
  row_bytes = _row_bytes(layout.row_length, both, kv_MCKh.dtype)
  slide = forward._slides(layout, page, form)
  if slide:
    own = forward._own_pages(layout.row_length // page, page, SLIDE_TOKENS)
    tile = own * page
  else:
    own, tile = 0, forward._row_tile(page, group)
  tiles = q_TNH.shape[0] // tile
  rows = tile * group
  in_row = layout.row_length // tile
  pages = layout.row_length // page

  def heads_first(x_TNh):  # [T, N, h] -> [K, tiles, rows, h]
    x = x_TNh.reshape(tiles, tile, heads, group, -1)
    return x.transpose(2, 0, 1, 3, 4).reshape(heads, tiles, rows, -1)

  g = g_TNH.astype(q_TNH.dtype)
  delta = (g.astype(nx.F32) * out_TNH.astype(nx.F32)).sum(-1)
  zero = jnp.zeros_like(g)
  if shape.packed:
    g = jnp.concatenate([zero, g], -1)
  facts = jnp.stack([lse_TN * math.log2(math.e), delta], -1)
  inputs = [
      shape.pad(heads_first(q_TNH)),
      heads_first(g),
      heads_first(facts).swapaxes(2, 3),  # [K, tiles, 2, rows]
      kv_MCKh.reshape(-1, page, heads * both),
  ]
  by_tile = lambda k, r, t: (k, r * in_row + t, 0, 0)
  by_row = lambda k, r, t: (r, 0, k)
  specs = [
      pl.BlockSpec((1, 1, rows, shape.depth), by_tile),
      pl.BlockSpec((1, 1, rows, shape.depth), by_tile),
      pl.BlockSpec((1, 1, 2, rows), by_tile),
      pl.BlockSpec((pages, page, both), by_row),
  ]
  if slide:
    more, more_specs, kernel = _slide_inputs(layout, tile, in_row, own, shape)
  else:
    more, more_specs, kernel = _walk_inputs(
        layout, tile, in_row, selected_TKj, shape
    )
  dq, dkv = pl.pallas_call(
      kernel,
      grid=(heads, q_TNH.shape[0] // layout.row_length, in_row),
      in_specs=specs + more_specs,
      out_specs=[
          pl.BlockSpec((1, 1, rows, shape.depth), by_tile),
          pl.BlockSpec((pages, page, both), by_row),
      ],
      out_shape=[
          jax.ShapeDtypeStruct(inputs[0].shape, q_TNH.dtype),
          jax.ShapeDtypeStruct(inputs[3].shape, nx.F32),
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('arbitrary',) * 3,
          # No more than it needs: XLA keeps operands in the rest.
          vmem_limit_bytes=row_bytes + (16 << 20),
      ),
      interpret=nx.interpret(),
      name='paged_attention_backward',
  )(*inputs, *more)
  dq = dq[..., : shape.width].reshape(heads, tiles, tile, group, -1)
  dq = dq.transpose(1, 2, 0, 3, 4).reshape(q_TNH.shape)
  return dq, dkv.reshape(kv_MCKh.shape).astype(kv_MCKh.dtype)


def _row_bytes(length: int, both: int, dtype) -> int:
  bytes_of_token = 2 * both * (jnp.dtype(dtype).itemsize + 4)
  if not nx.interpret() and length * bytes_of_token > ROW_BYTES:
    raise ValueError(
        f'layout.row_length={length}: allowed is {ROW_BYTES // bytes_of_token}'
        f' for heads of {both // 2}, whose keys and gradients stay in VMEM'
    )
  return length * bytes_of_token


def _step(shape, dq, q, g, facts, kv_ref, dkv_ref, pages):
  """Some pages: adds to their gradients, returns dq [depth, R] with their part.

  Nothing is written before all is computed, so that the matrix units have one
  page while the vector units have another.

  Args:
    shape: sizes.
    dq: so far.
    q: queries [R, depth].
    g: of the output, as q.
    facts: log-sum-exp and rowsum(dO ∘ O), [2, R].
    kv_ref: keys and values of the row, by page.
    dkv_ref: their gradients.
    pages: (page, which elements are seen or None, which rows or None) of each.
  """
  dot, width = shape.numerics.dot, shape.width
  lse, delta = facts[:1], facts[1:]
  found = []
  for page, seen, rows in pages:
    kv = kv_ref[page]
    # What no row sees may hold anything, and 0 · NaN is NaN.
    kv = jnp.where(jnp.abs(kv) < 3e38, kv, jnp.zeros_like(kv))
    k, v = (kv, kv) if shape.packed else (kv[:, :width], kv[:, width:])
    bent = s = shape.bend(dot(k, q, forward._BY_WIDTH))
    if seen is not None:
      s = jnp.where(seen, s, -jnp.inf)
    own = lse if rows is None else jnp.where(rows, lse, forward._FAR)
    p = jnp.exp2(s * shape.scale - own)
    ds = p * (dot(v, g, forward._BY_WIDTH) - delta) * width**-0.5
    if shape.form.soft_cap:
      ds *= 1 - bent * bent
    p, ds = p.astype(kv.dtype), ds.astype(kv.dtype)
    found.append((page, dot(ds, q, _BY_ROWS), dot(p, g, _BY_ROWS)))
    dq += dot(k, ds, forward._BY_KEY)
  for page, dk, dv in found:
    if shape.packed:
      dkv_ref[page] += dk + dv
    else:
      dkv_ref[page, :, :width] += dk
      dkv_ref[page, :, width:] += dv
  return dq


# ------------------------------------------------------------ sliding windows


def _slide_inputs(layout, tile, in_row, own, shape):
  """Returns more inputs, their specs and the kernel."""
  page, group = shape.page, shape.group
  place = jnp.arange(layout.positions_T.shape[0]) % layout.row_length
  first = ((place - layout.positions_T) // page).astype(jnp.int32)
  first = jnp.repeat(first.reshape(-1, tile), group, 1)[:, None]
  spec = pl.BlockSpec(
      (1, 1, tile * group), lambda k, r, t: (r * in_row + t, 0, 0)
  )
  kernel = functools.partial(_slide, shape=shape, own=own)
  return [first], [spec], kernel


def _slide(q, g, facts, kv, first, dq, dkv, *, shape, own):
  window = shape.form.window
  tile = pl.program_id(2)

  @pl.when(tile == 0)
  def _():
    dkv[...] = jnp.zeros(dkv.shape, dkv.dtype)

  page, back = shape.page, forward._back(shape.page, window)
  for r, rows, plan in forward._slide_plan(shape, own, back):
    part = pl.ds(r, rows)
    total = jnp.zeros((shape.depth, rows), nx.F32)
    ahead = forward._ahead(shape, r, rows)
    for j, diagonal, edge, other in plan:
      off = (j - back) * page
      number = tile * own + j - back
      seen, mine = None, None
      if diagonal:
        seen = ahead >= off
      if edge:
        near = ahead < window + off
        seen = near if seen is None else seen & near
      if other:
        mine = first[0, :, part] <= number
      total = _step(
          shape,
          total,
          q[0, 0, part],
          g[0, 0, part],
          facts[0, 0, :, part],
          kv,
          dkv,
          [(jnp.maximum(number, 0), seen, mine)],
      )
    dq[0, 0, part] = total.T.astype(dq.dtype)


# ------------------------------------------------------------- lists of pages


def _walk_inputs(layout, tile, in_row, selected_TKj, shape):
  """Returns more inputs, their specs and the kernel."""
  page, group = shape.page, shape.group
  positions, table, current = tile_facts(layout, page, tile)
  count, numbers = visits(
      selected_TKj, layout, positions, current, page, shape.form
  )
  # Pages of a row, counted from its first.
  begin = table[:, 0] % (layout.row_length // page)
  walk = jnp.concatenate(
      [
          count[..., None],
          jnp.broadcast_to(begin[:, None, None], (*count.shape, 1)),
          numbers,
      ],
      -1,
  )[:, :, None]
  rows, own = tile * group, walk.shape[1] > 1
  more = [walk, jnp.repeat(positions, group, 1)[:, None]]
  specs = [
      pl.BlockSpec(
          (1, 1, 1, walk.shape[3]),
          lambda k, r, t: (r * in_row + t, k if own else 0, 0, 0),
          memory_space=pltpu.SMEM,
      ),
      pl.BlockSpec((1, 1, rows), lambda k, r, t: (r * in_row + t, 0, 0)),
  ]
  if selected_TKj is not None:
    chosen = forward._chosen_rows(selected_TKj, layout, tile, group)
    more.append(chosen)
    specs.append(
        pl.BlockSpec(
            (1, 1, chosen.shape[2], rows),
            lambda k, r, t: (r * in_row + t, k, 0, 0),
        )
    )
  kernel = functools.partial(_walk, shape=shape)
  return more, specs, kernel


def _walk(q, g, facts, kv, walk, pos, *rest, shape):
  *chosen, dq, dkv = rest

  @pl.when(pl.program_id(2) == 0)
  def _():
    dkv[...] = jnp.zeros(dkv.shape, dkv.dtype)

  count, begin = walk[0, 0, 0, 0], walk[0, 0, 0, 1]
  rows, position = q.shape[2], pos[0]
  offsets = forward._iota((shape.page, 1), 0)
  query, grad, fact = q[0, 0], g[0, 0], facts[0, 0]

  def facts_of(place, current=False):
    number = walk[0, 0, 0, 2 + place]
    keys = number * shape.page + offsets
    seen = keys <= position if current else None
    if shape.form.window is not None:
      near = keys > shape.bound(position, number)
      seen = near if seen is None else seen & near
    mine = None
    if chosen and not current:
      hit = jnp.where(chosen[0][0, 0] == number, 1.0, 0.0)
      mine = hit.max(0, keepdims=True) > 0
    return begin + number, seen, mine

  def visit(pages, total):
    return _step(shape, total, query, grad, fact, kv, dkv, pages)

  def several(i, total):
    return visit([facts_of(i * AT_ONCE + j) for j in range(AT_ONCE)], total)

  total = jnp.zeros((shape.depth, rows), nx.F32)
  whole = lax.div(count - 1, jnp.int32(AT_ONCE))
  total = lax.fori_loop(0, whole, several, total)
  total = lax.fori_loop(
      whole * AT_ONCE, count - 1, lambda i, t: visit([facts_of(i)], t), total
  )
  total = visit([facts_of(count - 1, current=True)], total)
  dq[0, 0] = total.T.astype(dq.dtype)
