"""Products of e4m3 numbers as a loop over row tiles of one height."""

import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def matmul(x, x_scale, w, w_scale, numerics):
  """Returns float32 [T, F], one [ROW_TILE, D] x [D, F] product a step.

  Args:
    x: e4m3 [T, D].
    x_scale: float32 [T, 1].
    w: e4m3 [D, F].
    w_scale: float32 [blocks of D, blocks of F].
    numerics: summation rules.
  """
  x, w, w_scale = _prepare(x, w, w_scale)
  height = nx.ROW_TILE if numerics.exact else x.shape[0]
  tiles = x.reshape(-1, height, x.shape[1]), x_scale.reshape(-1, height, 1)

  def tile(args):
    rows, scale = args
    return _tile(rows, scale, w, w_scale, numerics)

  return lax.map(tile, tiles).reshape(x.shape[0], w.shape[1])


def grouped(x, x_scale, w, w_scale, expert, numerics):
  """Returns float32 [R, F], one tile by its expert's matrix a step.

  Tiles without a slot, whose expert is E, are zeros and meet the last expert.

  Args:
    x: e4m3 [R, D].
    x_scale: float32 [R, 1].
    w: e4m3 [E, D, F].
    w_scale: float32 [E, blocks of D, blocks of F].
    expert: int32 [tiles].
    numerics: summation rules.
  """
  x, w, w_scale = _prepare(x, w, w_scale)
  expert = jnp.minimum(expert, w.shape[0] - 1)

  def tile(args):
    rows, scale, e = args
    return _tile(rows, scale, w[e], w_scale[e], numerics)

  count = expert.shape[0]
  tiles = x.reshape(count, -1, x.shape[1]), x_scale.reshape(count, -1, 1)
  return lax.map(tile, (*tiles, expert)).reshape(x.shape[0], w.shape[-1])


def _prepare(x, w, w_scale):
  """Widens the numbers and gives every column its scale."""
  # Either holds every e4m3 number; a CPU has no products of bfloat16.
  wide = nx.F32 if nx.platform() == 'cpu' else jnp.bfloat16
  w_scale = jnp.repeat(w_scale, w.shape[-1] // w_scale.shape[-1], -1)
  return x.astype(wide), w.astype(wide), w_scale


def _tile(x, x_scale, w, w_scale, numerics):
  total = None
  block = w.shape[0] // w_scale.shape[0]
  for b in range(w_scale.shape[0]):
    inner = slice(b * block, (b + 1) * block)
    part = numerics.dot(x[:, inner], w[inner], _ROWS_BY_COLUMNS)
    part = numerics.keep(part * (x_scale * w_scale[b]))
    total = part if total is None else total + part
  return total
