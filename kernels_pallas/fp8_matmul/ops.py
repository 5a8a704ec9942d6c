"""Dense product of e4m3 numbers with float32 scales, on fixed row tiles.

A row of x has one scale and a block of [128, 128] weights has one, so that a
row's result depends on that row only. The products of a block of 128 are added
in float32 and scaled before they join those of the next block.

Source: arXiv:2209.05433 for e4m3; arXiv:2412.19437, section 3.3, for scales of
small groups and the accumulation in float32. It differs in that a row has one
scale where the paper has one for every 128 of its elements, and in that the
gradients are not quantised.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import numerics as nx
from kernels_pallas.fp8_matmul import pallas_tpu
from kernels_pallas.fp8_matmul import reference
from kernels_pallas.fp8_matmul import xla

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3
BLOCK = 128  # weights that share a scale, in both directions

_SMALLEST = 2.0**-126  # normal float32; what is below may be flushed to zero

IMPLS = {
    'pallas': pallas_tpu.matmul,
    'xla': xla.matmul,
    'reference': reference.matmul,
}


def quantize_rows(x_TD):
  """q = e4m3(x / s), s_t = max_d |x_td| · (1 / 448).

  Args:
    x_TD: [T, D].

  Returns:
    float8_e4m3fn [T, D] and the scales, float32 [T, 1]. A row of zeros, or of
    numbers so small that s is no normal float32, becomes zeros of scale 1.

  Raises:
    ValueError: if x is not [T, D].
  """
  if x_TD.ndim != 2:
    raise ValueError(f'x_TD {x_TD.shape}: expected [T, D]')
  x = x_TD.astype(nx.F32)
  scale = _scale(jnp.max(jnp.abs(x), 1, keepdims=True))
  return _round(x, scale), scale


def quantize_blocks(w_DF):
  """q = e4m3(w / s), s = max |w| · (1 / 448) over each block of [128, 128].

  Args:
    w_DF: [D, F]; D and F below 128, where a block has the whole dimension, or
      multiples of 128.

  Returns:
    float8_e4m3fn [D, F] and the scales, float32 [D / 128, F / 128], at least
    [1, 1].

  Raises:
    ValueError: on shapes that have no whole blocks.
  """
  if w_DF.ndim != 2 or any(n > BLOCK and n % BLOCK for n in w_DF.shape):
    raise ValueError(
        f'w_DF {w_DF.shape}: expected [D, F], each at most {BLOCK} or a'
        f' multiple of it'
    )
  d, f = (min(n, BLOCK) for n in w_DF.shape)
  w = w_DF.astype(nx.F32).reshape(w_DF.shape[0] // d, d, -1, f)
  scale = _scale(jnp.max(jnp.abs(w), (1, 3), keepdims=True))
  return _round(w, scale).reshape(w_DF.shape), scale[:, 0, :, 0]


def dequantize_blocks(w_DF, scale):
  """Returns float32 [D, F] of what `quantize_blocks` returned."""
  d, f = (n // blocks for n, blocks in zip(w_DF.shape, scale.shape))
  return w_DF.astype(nx.F32) * jnp.repeat(jnp.repeat(scale, d, 0), f, 1)


def _scale(largest):
  # A division by a constant is compiled to this product, in some programs.
  scale = largest * nx.F32(1 / LARGEST)
  return jnp.where(scale < _SMALLEST, 1.0, scale)


def _round(x, scale):
  return jnp.clip(x / scale, -LARGEST, LARGEST).astype(E4M3)


def fp8_matmul(x_TD, w_DF, *, numerics: nx.Numerics, impl: str = 'auto'):
  """y_tf = Σ_b (Σ_{d in b} q_td q_df) · (s_t s_bf), blocks b of D ascending.

  The gradient passes straight through the rounding: dx = g Wᵀ and dw = Xᵀ g in
  float32, where X and W are the quantised factors times their scales.

  Args:
    x_TD: [T, D], T a multiple of ROW_TILE; rounded by `quantize_rows`.
    w_DF: [D, F]; rounded by `quantize_blocks`.
    numerics: summation rules; its dtype plays no part.
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
  return _forward(x, w, fun, numerics)[0]


def _forward(x, w, fun, numerics):
  saved = *quantize_rows(x), *quantize_blocks(w)
  # What carries a dtype to the backward pass must be an array.
  dtypes = jnp.zeros((), x.dtype), jnp.zeros((), w.dtype)
  return fun(*saved, numerics), (saved, dtypes)


def _backward(fun, numerics, residuals, g):
  del fun
  (x, x_scale, w, w_scale), (x_dtype, w_dtype) = residuals
  x, w = x.astype(nx.F32) * x_scale, dequantize_blocks(w, w_scale)
  dx = numerics.dot(g, w, (((1,), (1,)), ((), ())))
  dw = numerics.dot(x, g, (((0,), (0,)), ((), ())))
  return dx.astype(x_dtype.dtype), dw.astype(w_dtype.dtype)


_matmul.defvjp(_forward, _backward)
