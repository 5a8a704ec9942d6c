"""Paged attention: one op for decode, chunked prefill and the learner.

A stream of query tokens reads keys and values from pages through a page table.
Tokens of one sequence that share a tile of `QUERY_TILE` positions are computed
together; a page is the unit of reading, of selection and of accumulation. A
token's result depends on its own sequence only, whatever else is in the stream
and wherever its pages lie.
"""

from __future__ import annotations

import functools

import jax

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import backward
from kernels_pallas.paged_attention import pallas_tpu
from kernels_pallas.paged_attention import pallas_tpu_backward
from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention import xla
from kernels_pallas.paged_attention.layout import QUERY_TILE
from kernels_pallas.paged_attention.layout import Layout

# Forward, and backward on packed rows.
IMPLS = {
    'pallas': (pallas_tpu.attend, pallas_tpu_backward.attend_rows_backward),
    'xla': (xla.attend, backward.attend_rows_backward),
    'reference': (reference.attend, backward.attend_rows_backward),
}


def paged_attention(
    q_TNH,
    kv_MCKh,
    layout: Layout,
    *,
    numerics: nx.Numerics,
    window: int | None = None,
    selected_TKj=None,
    impl: str = 'auto',
):
  """o_t = Σ_s softmax_s(q_t · k_s / √H) v_s over the visible positions s.

  Visible are the positions s <= t of the token's own sequence that also fall in
  the window (t - s < window), or in the current page and the selected pages.
  The softmax runs online over pages in the order of absolute position (Source:
  arXiv:2112.05682 alg. 1, arXiv:2205.14135); pages outside the window or the
  tile's selection are not read.

  Args:
    q_TNH: [T, N, H] query stream, N = G·K heads.
    kv_MCKh: [M, C, K, 2H] page pool, keys in the first H columns of a head and
      values in the last.
    layout: where the tokens stand.
    numerics: rounding and summation rules.
    window: visible positions of a sliding window, or None.
    selected_TKj: int32 [T, K, j] page numbers within the sequence that each
      token and KV head selected besides its current page, -1 for none; None for
      full causal attention.
    impl: 'auto', 'pallas', 'xla' or 'reference'.

  Returns:
    [T, N, H], rounded to `numerics.dtype`; rows in no tile are zero.

  Raises:
    ValueError: on shapes that do not fit, or window and selection together;
      the message names the argument, its value and what is allowed.
  """
  _check(q_TNH, kv_MCKh, layout, window, selected_TKj)
  fun = nx.choose(impl, IMPLS, 'paged_attention')
  if layout.row_length is None:
    return fun[0](q_TNH, kv_MCKh, layout, selected_TKj, window, numerics)[0]
  return _attend_rows(
      q_TNH, kv_MCKh, layout, selected_TKj, window, numerics, fun
  )


def _check(q, kv, layout, window, selected):
  if q.ndim != 3 or kv.ndim != 4 or kv.shape[3] != 2 * q.shape[2]:
    raise ValueError(
        f'q_TNH {q.shape} and kv_MCKh {kv.shape}: expected [T, N, H] and'
        ' [M, C, K, 2H]'
    )
  if q.shape[1] % kv.shape[2]:
    raise ValueError(
        f'q_TNH {q.shape}: {q.shape[1]} query heads, a multiple of the'
        f' {kv.shape[2]} KV heads is needed'
    )
  if kv.shape[1] % QUERY_TILE or not kv.shape[1]:
    raise ValueError(
        f'kv_MCKh {kv.shape}: pages of {kv.shape[1]} tokens, a multiple of'
        f' {QUERY_TILE} is needed'
    )
  for name in ('positions_T', 'sequences_T'):
    shape = getattr(layout, name).shape
    if shape != q.shape[:1]:
      raise ValueError(
          f'layout.{name} {shape}: q_TNH {q.shape} needs {q.shape[:1]}'
      )
  if selected is not None and (
      selected.ndim != 3 or selected.shape[:2] != (q.shape[0], kv.shape[2])
  ):
    raise ValueError(
        f'selected_TKj {selected.shape}: expected [{q.shape[0]},'
        f' {kv.shape[2]}, j]'
    )
  if window is not None and (window < 1 or selected is not None):
    raise ValueError(
        f'window={window}: a positive window, and no selection beside it, is'
        ' allowed'
    )
  if layout.row_length is not None and kv.shape[0] * kv.shape[1] != q.shape[0]:
    raise ValueError(
        f'kv_MCKh {kv.shape}: {kv.shape[0]} pages of {kv.shape[1]}, but the'
        f' rows hold {q.shape[0]} tokens'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attend_rows(q, kv, layout, selected, window, numerics, fun):
  return fun[0](q, kv, layout, selected, window, numerics)[0]


def _rows_forward(q, kv, layout, selected, window, numerics, fun):
  out, lse = fun[0](q, kv, layout, selected, window, numerics)
  return out, (q, kv, layout, selected, out, lse)


def _rows_backward(window, numerics, fun, saved, g):
  q, kv, layout, selected, out, lse = saved
  dq, dkv = fun[1](q, kv, layout, selected, out, lse, g, window, numerics)
  return dq, dkv, None, None


_attend_rows.defvjp(_rows_forward, _rows_backward)
