"""Dense matrix product on Hopper's tensor cores (wgmma), in bfloat16.

A block of one warpgroup computes a tile of the result; the tiles of its factors
come through a ring in shared memory. The tensor core computes every row by
itself: the height of a tile follows the number of rows, while the width of an
instruction, and the tiles of depth that are added, ascending, depend on D and F
alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import numerics as nx
from kernels_pallas import warpgroup

LINE = 64  # bfloat16 numbers that shared memory keeps together
DEPTH_TILE = LINE
WIDTHS = (64, 128)  # of a tile: the higher one above 64 columns
HEIGHTS = (64, 128)  # of a tile: the higher one above 64 rows
STAGES = 3  # of the ring; two blocks of a multiprocessor have room for it
STORE_COLUMNS = 32  # of the result, on their way to memory at once


def check_dtypes(name: str, *factors) -> None:
  """Raises ValueError unless all factors are bfloat16."""
  if any(x.dtype != jnp.bfloat16 for x in factors):
    found = ' and '.join(str(x.dtype) for x in factors)
    raise ValueError(
        f"{name} {found}: impl='pallas' on gpu needs bfloat16 (wgmma rounds"
        " float32 factors to TF32); float32 is for 'xla'"
    )


def fit(size: int, sizes: tuple[int, int]) -> int:
  """Returns the smaller tile if it covers a dimension, else the larger."""
  return sizes[0] if size <= sizes[0] else sizes[1]


def pad(x, *units: int):
  """Pads the last dimensions with zeros to multiples of the units."""
  widths = [(0, 0)] * (x.ndim - len(units))
  widths += [(0, -n % unit) for n, unit in zip(x.shape[-len(units) :], units)]
  return jnp.pad(x, widths) if any(end for _, end in widths) else x


def whole(tile: int) -> int:
  """Returns what a dimension must be a multiple of.

  The copies to and from shared memory stop at the end of an array of whole
  lines; the interpreter wants whole tiles.
  """
  return tile if nx.interpret() else LINE


def matmul(x, w, numerics):
  """Returns x @ w in float32.

  Raises:
    ValueError: unless both factors are bfloat16.
  """
  del numerics
  check_dtypes('x_TD and w_DF', x, w)
  rows, columns = x.shape[0], w.shape[1]
  height = HEIGHTS[0] if nx.interpret() else fit(rows, HEIGHTS)
  width = fit(columns, WIDTHS)
  x = pad(x, whole(height), DEPTH_TILE)
  w = pad(w, DEPTH_TILE, whole(width))

  def kernel(x_ref, w_ref, y_ref, store):
    row, column = lax.axis_index('rows'), lax.axis_index('columns')
    tile = product(x_ref, w_ref, row, column, height, width)
    write(tile, y_ref, store, row, column)

  y = warpgroup.kernel(
      kernel,
      name='matmul',
      # A tile of weights is read by blocks that follow each other.
      grid=dict(columns=pl.cdiv(columns, width), rows=pl.cdiv(rows, height)),
      out=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), nx.F32),
      scratch=[store_memory(height)],
  )(x, w)
  return y[:rows, :columns]


def product(x_ref, w_ref, row, column, height, width, transposed=False):
  """Returns a tile of x w, or of x wᵀ.

  Args:
    x_ref: bfloat16 [R, D] in memory.
    w_ref: bfloat16 [D, F] in memory, or [F, D].
    row: of the tile, in tiles.
    column: of the tile, in tiles.
    height: of the tile.
    width: of the tile.
    transposed: whether w is [F, D].

  Returns:
    float32 [height, width].
  """
  spec = functools.partial(plgpu.BlockSpec, delay_release=1)
  x_spec = spec((height, DEPTH_TILE), lambda d: (row, d))
  w_spec = spec((DEPTH_TILE, width), lambda d: (d, column))
  if transposed:
    w_spec = spec((width, DEPTH_TILE), lambda d: (column, d))

  def run(acc):
    def step(_, x, w):
      plgpu.wgmma(acc, x, plgpu.transpose_ref(w, (1, 0)) if transposed else w)
      # What the tensor core has read may be overwritten.
      plgpu.wgmma_wait(1)

    plgpu.emit_pipeline(
        step,
        grid=(x_ref.shape[1] // DEPTH_TILE,),
        in_specs=[x_spec, w_spec],
        max_concurrent_steps=STAGES,
    )(x_ref, w_ref)
    return acc[...]

  return pl.run_scoped(run, plgpu.ACC((height, width), nx.F32))


def store_memory(height: int):
  """Returns the shared memory that `write` needs."""
  return plgpu.SMEM((height, STORE_COLUMNS), nx.F32)


def write(tile, y_ref, store, row, column):
  """Writes a tile of the result, without what exceeds it.

  Args:
    tile: float32 [height, width].
    y_ref: float32 [R, F] in memory.
    store: `store_memory`.
    row: of the tile, in tiles.
    column: of the tile, in tiles.
  """
  height, width = tile.shape
  for start in range(0, width, STORE_COLUMNS):
    store[...] = tile[:, start : start + STORE_COLUMNS]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        store,
        y_ref.at[
            pl.ds(row * height, height),
            pl.ds(column * width + start, STORE_COLUMNS),
        ],
    )
    plgpu.wait_smem_to_gmem(0)
