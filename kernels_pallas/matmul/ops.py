"""Dense matrix product on fixed row tiles."""

from __future__ import annotations

import functools

import jax

from kernels_pallas import numerics as nx
from kernels_pallas.matmul import pallas_gpu
from kernels_pallas.matmul import pallas_tpu
from kernels_pallas.matmul import reference
from kernels_pallas.matmul import xla

IMPLS = {
    'pallas': {'tpu': pallas_tpu.matmul, 'gpu': pallas_gpu.matmul},
    'xla': xla.matmul,
    'reference': reference.matmul,
}


def matmul(x_TD, w_DF, *, numerics: nx.Numerics, impl: str = 'auto'):
  """y = x w, every row computed in a row tile.

  Args:
    x_TD: [T, D], T a multiple of ROW_TILE.
    w_DF: [D, F].
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
  fun = nx.choose(impl, IMPLS, 'matmul')
  return _matmul(x_TD, w_DF, fun, numerics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(x, w, fun, numerics):
  return fun(x, w, numerics)


def _forward(x, w, fun, numerics):
  return fun(x, w, numerics), (x, w)


def _backward(fun, numerics, saved, g):
  del fun
  x, w = saved
  dx = numerics.dot(g, w, (((1,), (1,)), ((), ())))
  dw = numerics.dot(x, g, (((0,), (0,)), ((), ())))
  return dx.astype(x.dtype), dw.astype(w.dtype)


_matmul.defvjp(_forward, _backward)
