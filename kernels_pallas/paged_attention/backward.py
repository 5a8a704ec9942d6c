"""Gradient of attention on packed rows: dense blocks, nothing read twice.

Rows are cut into blocks of queries; a block reads the keys from the window's
start, or all keys of its row, to its own end. Where a row's queries are the end
of a longer row of keys (`layout.key_starts_BS`), places count in the keys. The gradient is deterministic but
takes no part in the promise of equal bits, so its products are free.

  P = exp(S - lse),  dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)),
  dQ = dS K / √H,  dK = dSᵀ Q / √H.   Source: arXiv:2205.14135 alg. 4.

A soft cap, s = cap · tanh(S / cap), multiplies dS by 1 - tanh². With a sink
page a window layer reads its row from the start.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kernels_pallas import numerics as nx

QUERY_BLOCK = 64


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
    kv_MCKh: keys and values; the pages are the rows, or rows of keys.
    layout: of the rows.
    selected_TKj: selected pages, or None.
    out_TNH: the output.
    lse_TN: log-sum-exp of the scores.
    g_TNH: gradient of the output.
    form: window, soft cap and sink page.
    numerics: precision of the products.
  """
  length = layout.row_length
  page, heads, width = kv_MCKh.shape[1:]
  width //= 2
  rows, group = q_TNH.shape[0] // length, q_TNH.shape[1] // heads

  past = kv_MCKh.shape[0] * page // rows - length  # keys before the queries

  def heads_first(x_TN):  # [T, N, ...] -> [rows, K, length, G, ...]
    x = x_TN.astype(nx.F32).reshape(rows, length, heads, group, *x_TN.shape[2:])
    return jnp.moveaxis(x, 2, 1)

  q, g = heads_first(q_TNH) * width**-0.5, heads_first(g_TNH)
  lse = heads_first(lse_TN)
  delta = (heads_first(out_TNH) * g).sum(-1)
  kv = kv_MCKh.astype(nx.F32).reshape(rows, past + length, heads, 2 * width)
  kv = kv.swapaxes(1, 2)  # [rows, K, past + length, 2H]
  seen = _Seen(layout, selected_TKj, page, rows, heads, form, past)
  dkv = jnp.zeros_like(kv)
  dq = []
  block = QUERY_BLOCK if length % QUERY_BLOCK == 0 else page
  for end in range(block, length + 1, block):
    lo = 0
    if form.window is not None and not form.sink_page:
      lo = max(0, past + end - block - form.window + 1)
      lo -= lo % page
    mine, rest = slice(end - block, end), slice(lo, past + end)
    size = (rows, heads, block * group)
    q_b = q[:, :, mine].reshape(*size, width)
    g_b = g[:, :, mine].reshape(*size, width)
    k, v = kv[:, :, rest, :width], kv[:, :, rest, width:]
    mask = seen.block(mine, rest)
    s = numerics.dot(q_b, k, _BY_LAST).reshape(rows, heads, block, group, -1)
    if form.soft_cap:
      bent = jnp.tanh(s / form.soft_cap)
      s = form.soft_cap * bent
    p = jnp.exp(s - lse[:, :, mine, :, None])
    p = jnp.where(mask, p, 0.0)
    dp = numerics.dot(g_b, v, _BY_LAST).reshape(p.shape)
    ds = p * (dp - delta[:, :, mine, :, None])
    if form.soft_cap:
      ds *= 1 - bent * bent
    p, ds = p.reshape(*size, -1), ds.reshape(*size, -1)
    dq.append(
        numerics.dot(ds, k, _BY_NEXT).reshape(rows, heads, block, group, width)
    )
    dk = numerics.dot(ds, q_b, _BY_ROWS)
    dv = numerics.dot(p, g_b, _BY_ROWS)
    dkv = dkv.at[:, :, rest].add(jnp.concatenate([dk, dv], -1))
  dq = jnp.concatenate(dq, 2) * width**-0.5
  dq = jnp.moveaxis(dq, 1, 2).reshape(q_TNH.shape).astype(q_TNH.dtype)
  dkv = dkv.swapaxes(1, 2).reshape(kv_MCKh.shape).astype(kv_MCKh.dtype)
  return dq, dkv


_BY_LAST = (((3,), (3,)), ((0, 1), (0, 1)))
_BY_NEXT = (((3,), (2,)), ((0, 1), (0, 1)))
_BY_ROWS = (((2,), (2,)), ((0, 1), (0, 1)))


class _Seen:
  """Which keys of a row each query sees."""

  def __init__(self, layout, selected_TKj, page, rows, heads, form, past):
    length = layout.row_length
    self._starts = layout.key_starts_BS
    if self._starts is None:
      position = layout.positions_T.reshape(rows, length)
      self._starts = jnp.arange(length) - position
    self._start = self._starts[:, past:]  # of the queries
    self._page, self._form, self._past = page, form, past
    self._selected: Any = None
    if selected_TKj is not None:
      chosen = selected_TKj.reshape(rows, length, heads, -1)
      self._selected = chosen.swapaxes(1, 2)

  def block(self, mine: slice, rest: slice):
    """Returns bool [rows, K or 1, queries, 1, keys]."""
    place = self._past + jnp.arange(mine.start, mine.stop)[:, None]
    key = jnp.arange(rest.start, rest.stop)
    seen = key <= place
    if self._form.window is not None:
      near = key > place - self._form.window
      if self._form.sink_page:
        near = near | (key < self._start[:, mine, None] + self._page)
      seen = seen & near
    same = self._start[:, mine, None] == self._starts[:, None, rest]
    seen = (seen & same)[:, None]
    if self._selected is not None:
      seen = seen & self._picked(mine, rest)
    return seen[:, :, :, None]

  def _picked(self, mine: slice, rest: slice):
    """Returns bool [rows, K, queries, keys]: own page or selected pages."""
    # Sequences begin on page boundaries, so pages of rows are their pages.
    pages = jnp.arange(rest.start // self._page, -(-rest.stop // self._page))
    first = (self._start // self._page)[:, None, mine, None]
    place = self._past + jnp.arange(mine.start, mine.stop)
    own = (place // self._page)[:, None] == pages
    picked = jnp.broadcast_to(own, (*first.shape[:3], len(pages)))
    for j in range(self._selected.shape[-1]):
      chosen = self._selected[:, :, mine, j, None]
      picked = picked | ((chosen >= 0) & (chosen + first == pages))
    # The last page may be longer than the block of queries.
    return jnp.repeat(picked, self._page, -1)[..., : rest.stop - rest.start]
