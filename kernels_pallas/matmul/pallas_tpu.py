"""Dense matrix product on the MXU: a row tile times a block of columns a step.

The MXU computes every row of a tile by itself, so on TPU the height of a tile
follows the number of rows. A CPU's product does not: interpreted, the height is
`ROW_TILE`. The blocks of columns, and the tiles in which a very deep product is
cut and added, ascending, depend on D and F alone.
"""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import numerics as nx

LANES = 128
COLUMNS = 1024  # of a block, at most
ROW_TILES = (512, 256, 128)  # on TPU, the highest that fits
BLOCK_BYTES = 8 << 20  # of a weight block, at most; two are in memory
DEPTH_TILE = 8192  # of a product that is too deep for one block, at most
VMEM_BYTES = 48 << 20  # of the 64 MiB that the smallest chip has

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def split(size: int, limit: int) -> int:
  """Returns the length of nearly equal blocks that cover a dimension.

  Args:
    size: of the dimension.
    limit: of a block, a multiple of `LANES`.

  Returns:
    The whole dimension if it fits, else a multiple of `LANES`; the last block
    may reach beyond the dimension.
  """
  if size <= limit:
    return size
  count = -(-size // limit)
  return -(-size // (count * LANES)) * LANES


def column_block(columns: int, depth: int, itemsize: int) -> int:
  """Returns how many columns a weight block takes, all of its depth included.

  Args:
    columns: F.
    depth: D of the product.
    itemsize: bytes of a weight.

  Raises:
    ValueError: if `LANES` columns of that depth do not fit.
  """
  fit = BLOCK_BYTES // (depth * itemsize) // LANES * LANES
  if not fit:
    raise ValueError(
        f'depth {depth} of a product of {itemsize}-byte weights: at most'
        f' {BLOCK_BYTES // (LANES * itemsize)} is allowed'
    )
  return split(columns, min(fit, COLUMNS))


def depth_tile(depth: int, itemsize: int) -> int:
  """Returns the depth of one product: all of it, or the largest tile.

  Args:
    depth: D.
    itemsize: bytes of a weight.

  Raises:
    ValueError: if a depth that does not fit is no multiple of `LANES`.
  """
  fit = BLOCK_BYTES // (LANES * itemsize)
  if depth <= fit:
    return depth
  tiles = range(LANES, min(fit, DEPTH_TILE) + 1, LANES)
  whole = [tile for tile in tiles if depth % tile == 0]
  if not whole:
    raise ValueError(
        f'D={depth} of x_TD: above {fit} a multiple of {LANES} is needed'
    )
  return whole[-1]


def row_tile(rows: int, depth: int, itemsize: int) -> int:
  """Returns the height of a row tile.

  Args:
    rows: T.
    depth: of one product.
    itemsize: bytes of an activation.

  Returns:
    `ROW_TILE` where interpreted; on TPU the highest of `ROW_TILES` that fits
    and pads `rows` by an eighth at most.
  """
  height = nx.ROW_TILE
  if not nx.interpret():
    fit = BLOCK_BYTES // (2 * depth * itemsize)
    for tile in ROW_TILES:
      if tile <= fit and -rows % tile <= rows // 8:
        height = tile
        break
  return min(height, rows)


def check_dtypes(name: str, x, w) -> None:
  """Raises ValueError unless both factors have one dtype, as the MXU needs."""
  if x.dtype != w.dtype:
    raise ValueError(
        f"{name} {x.dtype} and {w.dtype}: impl='pallas' needs one dtype"
    )


def matmul(x, w, numerics):
  """Returns x @ w in float32.

  Raises:
    ValueError: if the dtypes differ, or on a depth that can not be cut.
  """
  check_dtypes('x_TD and w_DF', x, w)
  rows, columns = x.shape[0], w.shape[1]
  size = w.dtype.itemsize
  depth = depth_tile(x.shape[1], size)
  height = row_tile(rows, depth, size)
  width = column_block(columns, depth, size)
  return pl.pallas_call(
      functools.partial(_kernel, numerics=numerics),
      out_shape=jax.ShapeDtypeStruct((rows, columns), nx.F32),
      # A weight block stays while the row tiles pass.
      grid=(
          pl.cdiv(columns, width),
          pl.cdiv(rows, height),
          x.shape[1] // depth,
      ),
      in_specs=[
          pl.BlockSpec((height, depth), lambda f, t, d: (t, d)),
          pl.BlockSpec((depth, width), lambda f, t, d: (d, f)),
      ],
      out_specs=pl.BlockSpec((height, width), lambda f, t, d: (t, f)),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'parallel', 'arbitrary'),
          vmem_limit_bytes=VMEM_BYTES,
      ),
      interpret=nx.interpret(),
      name='matmul',
  )(x, w)


def _kernel(x_ref, w_ref, y_ref, *, numerics):
  part = numerics.dot(x_ref[...], w_ref[...], _ROWS_BY_COLUMNS)

  # The output block stays in memory while its depth tiles pass.
  @pl.when(pl.program_id(2) == 0)
  def _():
    y_ref[...] = part

  @pl.when(pl.program_id(2) > 0)
  def _():
    y_ref[...] += part
