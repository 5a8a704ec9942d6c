"""Dense matrix product as a loop over row tiles of one height."""

from jax import lax

from kernels_pallas import numerics as nx

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def matmul(x, w, numerics):
  """Returns x @ w in float32, one [ROW_TILE, D] x [D, F] product a step."""
  if not numerics.exact:
    return numerics.dot(x, w, _ROWS_BY_COLUMNS)
  tiles = x.reshape(-1, nx.ROW_TILE, x.shape[1])
  y = lax.map(lambda tile: numerics.dot(tile, w, _ROWS_BY_COLUMNS), tiles)
  return y.reshape(x.shape[0], w.shape[1])
