"""Grouped matrix product on Hopper's tensor cores, in bfloat16.

The tiles of the dense product, each with the matrix of its expert. The weight
gradient of an expert is one product over its rows, whose tiles follow each
other.
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
from kernels_pallas.matmul import pallas_gpu as dense


class Grouped:
  """Forward, row gradient and weight gradient; takes tiles in order of expert.

  ValueError is raised unless the factors are bfloat16 and, compiled, a tile is
  a multiple of 64 rows.
  """

  @staticmethod
  def forward(x, w, expert, numerics):
    """Returns float32 [R, F]."""
    del numerics
    return _product(x, w, expert, False)

  @staticmethod
  def backward_rows(g, w, expert, numerics):
    """Returns float32 [R, D], g Wᵀ."""
    del numerics
    return _product(g, w, expert, True)

  @staticmethod
  def backward_weights(x, g, expert, num_experts, numerics):
    """Returns float32 [E, D, F], Σ over the expert's rows of xᵀ g."""
    del numerics
    dense.check_dtypes('x_RD and its cotangent', x, g)
    tile = _tile(x, expert)
    rows, columns = x.shape[1], g.shape[1]
    height = dense.fit(rows, dense.HEIGHTS)
    width = dense.fit(columns, dense.WIDTHS)
    x = dense.pad(x, dense.whole(height))
    g = dense.pad(g, dense.whole(width))
    x_shape = x.shape
    if nx.interpret():  # which does not know transposed tiles
      x = x.T
    # Of each expert: its first tile, and how many it has.
    index = jnp.arange(num_experts)[:, None]
    first = (expert < index).astype(jnp.int32).sum(-1)
    count = (expert == index).astype(jnp.int32).sum(-1)

    def kernel(first_ref, count_ref, x_ref, g_ref, dw_ref, store):
      owner = lax.axis_index('experts')
      row, column = lax.axis_index('rows'), lax.axis_index('columns')
      begin, steps = first_ref[owner], count_ref[owner]
      write = functools.partial(
          dense.write,
          y_ref=dw_ref.at[owner],
          store=store,
          row=row,
          column=column,
      )

      @pl.when(steps > 0)
      def _():
        write(
            _over_rows(
                x_ref, g_ref, begin, steps, row, column, (tile, height, width)
            )
        )

      @pl.when(steps == 0)
      def _():
        write(jnp.zeros((height, width), nx.F32))

    dw = warpgroup.kernel(
        kernel,
        name='grouped_matmul_weights',
        grid=dict(
            experts=num_experts,
            rows=pl.cdiv(rows, height),
            columns=pl.cdiv(columns, width),
        ),
        out=jax.ShapeDtypeStruct((num_experts, x_shape[1], g.shape[1]), nx.F32),
        scratch=[dense.store_memory(height)],
    )(first, count, x, g)
    return dw[:, :rows, :columns]


def _tile(x, expert) -> int:
  tile = x.shape[0] // expert.shape[0]
  if not nx.interpret() and tile % dense.LINE:
    raise ValueError(
        f'tiles of {tile} rows: on gpu a multiple of {dense.LINE} is needed'
    )
  return tile


def _product(x, w, expert, transposed):
  dense.check_dtypes('rows and w_EDF', x, w)
  tile, num_experts = _tile(x, expert), w.shape[0]
  if transposed and nx.interpret():  # which does not know transposed tiles
    w, transposed = w.swapaxes(1, 2), False
  columns = w.shape[1 if transposed else 2]
  width = dense.fit(columns, dense.WIDTHS)
  x = dense.pad(x, dense.DEPTH_TILE)
  units = dense.DEPTH_TILE, dense.whole(width)
  w = dense.pad(w, *(units[::-1] if transposed else units))

  def kernel(expert_ref, x_ref, w_ref, y_ref, store):
    row, column = lax.axis_index('tiles'), lax.axis_index('columns')
    owner = expert_ref[row]
    write = functools.partial(
        dense.write, y_ref=y_ref, store=store, row=row, column=column
    )

    @pl.when(owner < num_experts)
    def _():
      matrix = w_ref.at[owner]
      write(dense.product(x_ref, matrix, row, column, tile, width, transposed))

    @pl.when(owner == num_experts)
    def _():
      write(jnp.zeros((tile, width), nx.F32))

  y = warpgroup.kernel(
      kernel,
      name='grouped_matmul_rows' if transposed else 'grouped_matmul',
      # A tile of weights is read by blocks that follow each other.
      grid=dict(columns=pl.cdiv(columns, width), tiles=expert.shape[0]),
      out=jax.ShapeDtypeStruct(
          (x.shape[0], w.shape[1 if transposed else 2]), nx.F32
      ),
      scratch=[dense.store_memory(tile)],
  )(expert, x, w)
  return y[:, :columns]


def _over_rows(x_ref, g_ref, begin, steps, row, column, shape):
  """Returns a tile of Σ xᵀ g over `steps` tiles of rows from `begin` on.

  Args:
    x_ref: bfloat16 [R, D] in memory; [D, R] where interpreted.
    g_ref: bfloat16 [R, F] in memory.
    begin: the first tile of rows.
    steps: how many there are, at least one.
    row: of the tile of the result, in tiles.
    column: of the tile of the result, in tiles.
    shape: rows of a tile, height and width of the tile of the result.

  Returns:
    float32 [height, width].
  """
  tile, height, width = shape
  spec = functools.partial(plgpu.BlockSpec, delay_release=1)
  x_spec = spec((tile, height), lambda s: (begin + s, row))
  if nx.interpret():
    x_spec = spec((height, tile), lambda s: (row, begin + s))

  def run(acc):
    def step(_, x, g):
      x = x if nx.interpret() else plgpu.transpose_ref(x, (1, 0))
      plgpu.wgmma(acc, x, g)
      plgpu.wgmma_wait(1)

    plgpu.emit_pipeline(
        step,
        grid=(steps,),
        in_specs=[
            x_spec,
            spec((tile, width), lambda s: (begin + s, column)),
        ],
        max_concurrent_steps=dense.STAGES,
    )(x_ref, g_ref)
    return acc[...]

  return pl.run_scoped(run, plgpu.ACC((height, width), nx.F32))
