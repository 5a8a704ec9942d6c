"""Dense and grouped products of e4m3 numbers with scales, on fixed row tiles.

A row of x has one scale and a block of [128, 128] weights has one, so that a
row's result depends on that row only. The products of a block of 128 are added
in float32 and scaled before they join those of the next block.

Source: arXiv:2209.05433 for e4m3; arXiv:2412.19437, section 3.3, for scales of
small groups and the accumulation in float32; arXiv:2310.10537 for scales that
are powers of two, with which no scaling rounds and bfloat16 holds the scaled
numbers. It differs from the second in that a row has one scale where the paper
has one for every 128 of its elements, and in that the gradients are not
quantised.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx
from kernels_pallas.fp8_matmul import pallas_tpu
from kernels_pallas.fp8_matmul import reference
from kernels_pallas.fp8_matmul import xla
from kernels_pallas.grouped_matmul import ops as grouped

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
BLOCK = 128  # weights that share a scale, in both directions

_SMALLEST = 2.0**-126  # normal float32; what is below may be flushed to zero
_NORMAL = 2.0**-6  # of e4m3; what is below is a multiple of the next
_STEP = 2.0**-9

IMPLS = {
    'pallas': pallas_tpu.matmul,
    'xla': xla.matmul,
    'reference': reference.matmul,
}
GROUPED_IMPLS = {
    'pallas': pallas_tpu.grouped,
    'xla': xla.grouped,
    'reference': reference.grouped,
}


def quantize_rows(x_TD):
  """q = e4m3(x / s), s_t the least power of two with max_d |x_td| <= 448 s_t.

  Args:
    x_TD: [T, D].

  Returns:
    e4m3 numbers [T, D] and the scales, float32 [T, 1]. The numbers are of
    float8_e4m3fn, on CPU in a float32 array. A row of zeros, or of numbers so
    small that s is no normal float32, becomes zeros of scale 1.

  Raises:
    ValueError: if x is not [T, D].
  """
  if x_TD.ndim != 2:
    raise ValueError(f'x_TD {x_TD.shape}: expected [T, D]')
  x = x_TD.astype(nx.F32)
  scale = _scale(jnp.max(jnp.abs(x), 1, keepdims=True))
  return _round(x, scale), scale


def quantize_blocks(w_DF):
  """As `quantize_rows`, with a scale for each block of [128, 128].

  Args:
    w_DF: [..., D, F]; D and F below 128, where a block has the whole dimension,
      or multiples of 128.

  Returns:
    e4m3 numbers [..., D, F] and the scales, float32 [..., D / 128, F / 128], at
    least [..., 1, 1].

  Raises:
    ValueError: on shapes that have no whole blocks.
  """
  shape = w_DF.shape
  if w_DF.ndim < 2 or any(n > BLOCK and n % BLOCK for n in shape[-2:]):
    raise ValueError(
        f'w_DF {shape}: expected [..., D, F], each at most {BLOCK} or a'
        f' multiple of it'
    )
  d, f = (min(n, BLOCK) for n in shape[-2:])
  w = w_DF.astype(nx.F32).reshape(*shape[:-2], shape[-2] // d, d, -1, f)
  scale = _scale(jnp.max(jnp.abs(w), (-3, -1), keepdims=True))
  return _round(w, scale).reshape(shape), scale[..., 0, :, 0]


def dequantize_blocks(w_DF, scale):
  """Returns float32 [..., D, F] of what `quantize_blocks` returned."""
  w = w_DF.astype(nx.F32)
  return w * reference.spread(scale, w.shape)


def _scale(largest):
  """The exponent, one more above 1.75 · 2^e, for 448 is 1.75 · 2^8."""
  bits = lax.bitcast_convert_type(largest, jnp.int32)
  power = (bits + 0x1FFFFF) & 0x7F800000
  scale = lax.bitcast_convert_type(power, nx.F32) * nx.F32(2.0**-8)
  return jnp.where(scale < _SMALLEST, 1.0, scale)


def _round(x, scale):
  x = x * (1 / scale)  # exact, as both are powers of two
  steps = lax.round(x * (1 / _STEP), lax.RoundingMethod.TO_NEAREST_EVEN)
  # Five bits of exponent: with four, IEEE's rules leave 240 as the largest.
  normal = lax.reduce_precision(x, 5, 3)
  x = jnp.where(jnp.abs(x) < _NORMAL, steps * _STEP, normal)
  # The cast rounds nothing: XLA may drop one that is followed by its reverse.
  return x if nx.platform() == 'cpu' else x.astype(E4M3)


def fp8_matmul(x_TD, w_DF, *, numerics: nx.Numerics, impl: str = 'auto'):
  """y_tf = Σ_b (Σ_{d in b} q_td q_df) · (s_t s_bf), blocks b of D ascending.

  The gradient passes straight through the rounding (Source: arXiv:1308.3432,
  section 4, of any quantiser): dx = g Wᵀ and dw = Xᵀ g, where X and W are the
  quantised factors times their scales. These products are not of 8 bits: X, W
  and g are of `numerics.dtype`, in which X and W are not rounded again.

  Args:
    x_TD: [T, D], T a multiple of ROW_TILE; rounded by `quantize_rows`.
    w_DF: [D, F]; rounded by `quantize_blocks`.
    numerics: rounding and summation rules.
    impl: 'auto', 'pallas', 'xla' or 'reference'.

  Returns:
    float32 [T, F]; the caller rounds.

  Raises:
    ValueError: on shapes that do not fit, or that 'pallas' does not take.
  """
  if x_TD.ndim != 2 or w_DF.ndim != 2 or x_TD.shape[1] != w_DF.shape[0]:
    raise ValueError(
        f'x_TD {x_TD.shape} and w_DF {w_DF.shape}: expected [T, D] and [D, F]'
    )
  if numerics.exact and x_TD.shape[0] % nx.ROW_TILE:
    raise ValueError(
        f'x_TD {x_TD.shape}: {x_TD.shape[0]} rows, a multiple of {nx.ROW_TILE}'
        ' is needed'
    )
  fun = nx.choose(impl, IMPLS, 'fp8_matmul')
  return _matmul(x_TD, w_DF, fun, numerics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(x, w, fun, numerics):
  return fun(*quantize_rows(x), *quantize_blocks(w), numerics)


def _forward(x, w, fun, numerics):
  return _matmul(x, w, fun, numerics), (x, w)


def _backward(fun, numerics, saved, g):
  del fun
  x, w = saved
  x_factor, w_factor = _factors(x, w, numerics)
  g = numerics.cast(g)
  dx = numerics.dot(g, w_factor, (((1,), (1,)), ((), ())))
  dw = numerics.dot(x_factor, g, (((0,), (0,)), ((), ())))
  return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(_forward, _backward)


def _factors(x, w, numerics):
  """What the forward has multiplied; cheaper to make again than to keep."""
  q, scale = quantize_rows(x)
  w = dequantize_blocks(*quantize_blocks(w))
  return numerics.cast(q.astype(nx.F32) * scale), numerics.cast(w)


def fp8_grouped_matmul(
    x_RD,
    w_EDF,
    plan_: grouped.Plan,
    *,
    numerics: nx.Numerics,
    impl: str = 'auto',
):
  """As `fp8_matmul`, every tile of rows with the matrix of its expert.

  The gradient's products are those of `grouped_matmul`.

  Args:
    x_RD: [R, D] from `grouped_matmul.dispatch`; rounded by `quantize_rows`.
    w_EDF: [E, D, F]; rounded by `quantize_blocks`.
    plan_: from `grouped_matmul.plan`.
    numerics: rounding and summation rules.
    impl: 'auto', 'pallas', 'xla' or 'reference'.

  Returns:
    float32 [R, F], zero in tiles without a slot; the caller rounds.

  Raises:
    ValueError: on shapes that do not fit, or that 'pallas' does not take.
  """
  grouped.check_shapes(x_RD, w_EDF, plan_)
  fun = nx.choose(impl, GROUPED_IMPLS, 'fp8_grouped_matmul')
  pull = nx.choose(impl, grouped.IMPLS, 'grouped_matmul')
  return _grouped(x_RD, w_EDF, plan_.expert_of_tile, fun, pull, numerics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _grouped(x, w, expert, fun, pull, numerics):
  del pull
  return fun(*quantize_rows(x), *quantize_blocks(w), expert, numerics)


def _grouped_forward(x, w, expert, fun, pull, numerics):
  return _grouped(x, w, expert, fun, pull, numerics), (x, w, expert)


def _grouped_backward(fun, pull, numerics, saved, g):
  del fun
  x, w, expert = saved
  x_wide, w_wide = _factors(x, w, numerics)
  g = numerics.cast(g)
  dx = pull.backward_rows(g, w_wide, expert, numerics)
  dw = pull.backward_weights(x_wide, g, expert, w.shape[0], numerics)
  return dx.astype(x.dtype), dw.astype(w.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)
