"""Paged attention in plain XLA: tiles side by side, pages one after another."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention.layout import QUERY_TILE
from kernels_pallas.paged_attention.layout import from_tiles
from kernels_pallas.paged_attention.layout import tile_facts
from kernels_pallas.paged_attention.layout import to_tiles

_QUERY_BY_KEY = (((3,), (3,)), ((0, 1), (0, 1)))  # trh, tch -> trc (per head)
_PROB_BY_VALUE = (((3,), (2,)), ((0, 1), (0, 1)))


def _visit_list(current, num_pages, page_size, form, selected, positions):
  """Pages each tile visits, ascending.

  Returns:
    pages int32 [tiles, K or 1, j] page numbers within the sequence, -1 or less
    for none, and the number of columns in use.
  """
  if form.window is not None:
    back = min((form.window - 2) // page_size + 1, num_pages - 1)
    pages = current[:, None] + jnp.arange(-back, 1)
    if form.sink_page:  # unless the window reaches it
      first = jnp.where(current > back, 0, -1)
      pages = jnp.concatenate([first[:, None], pages], 1)
    return pages[:, None], pages.shape[1]
  every = jnp.arange(num_pages)
  if selected is None:
    pages = jnp.where(every <= current[:, None], every, -1)[:, None]
    return pages, current.max() + 1
  live = (positions >= 0)[:, :, None, None, None]
  wanted = ((selected[..., None] == every) & live).any((1, 3))  # [t, K, W]
  wanted |= (every == current[:, None])[:, None]
  pages = jnp.sort(jnp.where(wanted, every, num_pages), -1)
  count = wanted.astype(jnp.int32).sum(-1).max()
  return jnp.where(pages < num_pages, pages, -1), count


def attend(q_TNH, kv_MCKh, layout, selected_TKj, sink_N, form, numerics):
  """Returns the output [T, N, H] and the log-sum-exp of the scores [T, N].

  See `ops.paged_attention`.
  """
  keep, tile = numerics.keep, QUERY_TILE
  page_size, heads, width = kv_MCKh.shape[1:]
  width //= 2
  group = q_TNH.shape[1] // heads
  positions, table, current = tile_facts(layout, page_size)
  last = positions.max(-1)[:, None, None, None]
  q = to_tiles(q_TNH, layout).reshape(-1, tile, heads, group, width)
  q = q.transpose(0, 2, 1, 3, 4).reshape(-1, heads, tile * group, width)
  row_pos = jnp.repeat(positions, group, 1)[:, None]  # [tiles, 1, R]
  selected = None
  if selected_TKj is not None:
    selected = to_tiles(selected_TKj, layout, fill=-1)
  pages, count = _visit_list(
      current, table.shape[1], page_size, form, selected, positions
  )
  scale = width**-0.5
  cap = form.soft_cap

  def page(j, carry):
    m, l, acc = carry
    number = pages[:, :, j]  # [tiles, K or 1]
    block = jnp.take_along_axis(table, jnp.maximum(number, 0), 1)
    if number.shape[1] == 1:
      kv = kv_MCKh[block[:, 0]].transpose(0, 2, 1, 3)
    else:
      kv = kv_MCKh[block, :, jnp.arange(heads)]
    k, v = kv[..., :width], kv[..., width:]
    s = numerics.dot(q, k, _QUERY_BY_KEY)
    if cap:
      s = keep(cap * numerics.tanh(keep(s * (scale / cap))))
    else:
      s = keep(s * scale)
    key_pos = number[..., None] * page_size + jnp.arange(page_size)
    key_pos, rows = key_pos[:, :, None], row_pos[..., None]
    exists = (number >= 0)[..., None, None]
    seen = (key_pos <= rows) & exists
    # A slot that nobody wrote may hold anything, and 0 · NaN is NaN.
    v = jnp.where((key_pos <= last).swapaxes(2, 3) & exists, v, 0)
    if form.window is not None:
      near = key_pos > rows - form.window
      if form.sink_page:
        near |= (number == 0)[..., None, None]
      seen &= near
    if selected is not None:
      picked = (selected == number[:, None, :, None]).any(-1)  # [t, tile, K]
      picked |= (number == current[:, None])[:, None]
      seen &= jnp.repeat(picked.transpose(0, 2, 1), group, 2)[..., None]
    s = jnp.where(seen, s, -jnp.inf)
    m_new = jnp.maximum(m, s.max(-1))
    a = keep(jnp.exp(m - m_new))
    p = keep(jnp.exp(s - m_new[..., None]))
    l = keep(l * a) + numerics.tree_sum(p)
    pv = keep(numerics.dot(numerics.cast(p), v, _PROB_BY_VALUE))
    return m_new, l, keep(acc * a[..., None]) + pv

  shape = q.shape[:3]
  m, l = jnp.full(shape, -1e30), jnp.zeros(shape)
  if sink_N is not None:  # as a page with one key and no value
    sink = jnp.maximum(sink_N.astype(nx.F32), -1e30).reshape(heads, 1, group)
    sink = jnp.broadcast_to(sink, (heads, tile, group)).reshape(shape[1:])
    m, l = jnp.broadcast_to(sink, shape), jnp.ones(shape)
  carry = m, l, jnp.zeros(q.shape, nx.F32)
  m, l, acc = lax.fori_loop(0, count, page, carry)
  l = jnp.maximum(l, 1e-30)
  out = numerics.cast(keep(acc * (1 / l)[..., None]))
  out = out.reshape(-1, heads, tile, group, width).transpose(0, 2, 1, 3, 4)
  out = from_tiles(out.reshape(-1, tile, heads * group, width), layout)
  lse = m + keep(jnp.log(l))
  lse = lse.reshape(-1, heads, tile, group).transpose(0, 2, 1, 3)
  return out, from_tiles(lse.reshape(-1, tile, heads * group), layout)
