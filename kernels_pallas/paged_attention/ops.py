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
import jax.numpy as jnp

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import backward
from kernels_pallas.paged_attention import pallas_gpu
from kernels_pallas.paged_attention import pallas_gpu_backward
from kernels_pallas.paged_attention import pallas_tpu
from kernels_pallas.paged_attention import pallas_tpu_backward
from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention import xla
from kernels_pallas.paged_attention.form import Form
from kernels_pallas.paged_attention.layout import QUERY_TILE
from kernels_pallas.paged_attention.layout import Layout

# Forward, and backward on packed rows.
IMPLS = {
    'pallas': {
        'tpu': (pallas_tpu.attend, pallas_tpu_backward.attend_rows_backward),
        'gpu': (pallas_gpu.attend, pallas_gpu_backward.attend_rows_backward),
    },
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
    sink_N=None,
    soft_cap: float = 0.0,
    sink_page: bool = False,
    impl: str = 'auto',
):
  """o_t = Σ_s softmax_s(q_t · k_s / √H) v_s over the visible positions s.

  Visible are the positions s <= t of the token's own sequence that also fall in
  the window (t - s < window), or in the current page and the selected pages.
  The softmax runs online over pages in the order of absolute position (Source:
  arXiv:2112.05682 alg. 1, arXiv:2205.14135); pages outside the window or the
  tile's selection are not read.

  A sink is a learned logit of each query head that joins the denominator and
  has no value, p_ts = exp(s_ts) / (exp(sink) + Σ_u exp(s_tu)) (Source:
  arXiv:2508.10925 §2.2, after arXiv:2309.17453). A soft cap bounds the scores
  before that, s <- cap · tanh(s / cap) (Source: arXiv:2408.00118 §2). A sink
  page keeps the first tokens in sight of layers that do not see everything
  (Source: arXiv:2309.17453 §3.2).

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
    sink_N: float [N], a logit of each head, or None.
    soft_cap: bound of the scores, 0 for none; sinks are not bounded.
    sink_page: page 0 of the token's sequence is visible besides the window or
      the selection, in which it may also be.
    impl: 'auto', 'pallas', 'xla' or 'reference'.

  Returns:
    [T, N, H], rounded to `numerics.dtype`; rows in no tile are zero.

  Raises:
    ValueError: on shapes that do not fit, or window and selection together;
      the message names the argument, its value and what is allowed.
  """
  form = Form(window, soft_cap, sink_page)
  _check(q_TNH, kv_MCKh, layout, window, selected_TKj, sink_N)
  if sink_page and selected_TKj is not None:
    # A selection is a set: what is in it twice is seen once.
    first = jnp.zeros((*selected_TKj.shape[:2], 1), selected_TKj.dtype)
    selected_TKj = jnp.concatenate([selected_TKj, first], -1)
  fun = nx.choose(impl, IMPLS, 'paged_attention')
  inputs = q_TNH, kv_MCKh, layout, selected_TKj, sink_N, form, numerics
  if layout.row_length is None:
    return fun[0](*inputs)[0]
  return _attend_rows(*inputs, fun)


def _check(q, kv, layout, window, selected, sink):
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
  if window is not None and selected is not None:
    raise ValueError(f'window={window}: None is allowed beside a selection')
  if sink is not None and sink.shape != q.shape[1:2]:
    raise ValueError(
        f'sink_N {sink.shape}: q_TNH {q.shape} needs {q.shape[1:2]}'
    )
  held = q.shape[0]
  if layout.key_starts_BS is not None:
    held = layout.key_starts_BS.size
  if layout.row_length is not None and kv.shape[0] * kv.shape[1] != held:
    raise ValueError(
        f'kv_MCKh {kv.shape}: {kv.shape[0]} pages of {kv.shape[1]}, but the'
        f' rows hold {held} tokens'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend_rows(q, kv, layout, selected, sink, form, numerics, fun):
  return fun[0](q, kv, layout.of_pool(), selected, sink, form, numerics)[0]


def _rows_forward(q, kv, layout, selected, sink, form, numerics, fun):
  out, lse = fun[0](q, kv, layout.of_pool(), selected, sink, form, numerics)
  return out, (q, kv, layout, selected, sink, out, lse)


def _rows_backward(form, numerics, fun, saved, g):
  q, kv, layout, selected, sink, out, lse = saved
  if layout.key_starts_BS is not None:
    fun = fun[0], backward.attend_rows_backward
  dq, dkv = fun[1](q, kv, layout, selected, out, lse, g, form, numerics)
  return dq, dkv, None, None, _sink_gradient(sink, out, lse, g)


def _sink_gradient(sink, out, lse, g):
  """dsink_n = -Σ_t exp(sink_n - lse_tn) (o_tn · do_tn): its value is zero."""
  if sink is None:
    return None
  weight = jnp.exp(sink.astype(nx.F32) - lse)
  delta = (out.astype(nx.F32) * g.astype(nx.F32)).sum(-1)
  return -(weight * delta).sum(0).astype(sink.dtype)


_attend_rows.defvjp(_rows_forward, _rows_backward)
