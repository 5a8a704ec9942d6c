"""Dense product of e4m3 numbers as a loop over row tiles of one height."""

import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def matmul(x, x_scale, w, w_scale, numerics):
  """Returns float32 [T, F], one [ROW_TILE, D] x [D, F] product a step.

  Args:
    x: float8 [T, D].
    x_scale: float32 [T, 1].
    w: float8 [D, F].
    w_scale: float32 [blocks of D, blocks of F].
    numerics: summation rules.
  """
  # Either holds every e4m3 number; a CPU has no products of bfloat16.
  wide = nx.F32 if nx.platform() == 'cpu' else jnp.bfloat16
  x, w = x.astype(wide), w.astype(wide)
  columns = w.shape[1]
  block = w.shape[0] // w_scale.shape[0]
  w_scale = jnp.repeat(w_scale, columns // w_scale.shape[1], 1)

  def tile(args):
    rows, scale = args
    total = None
    for b in range(w_scale.shape[0]):
      inner = slice(b * block, (b + 1) * block)
      part = numerics.dot(rows[:, inner], w[inner], _ROWS_BY_COLUMNS)
      part = numerics.keep(part * (scale * w_scale[b]))
      total = part if total is None else total + part
    return total

  height = nx.ROW_TILE if numerics.exact else x.shape[0]
  tiles = x.reshape(-1, height, x.shape[1]), x_scale.reshape(-1, height, 1)
  return lax.map(tile, tiles).reshape(x.shape[0], columns)
