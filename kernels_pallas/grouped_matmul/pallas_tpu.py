"""Grouped matrix product on the MXU: a row tile by its expert's block a step.

The tiles of an expert follow each other, so its weight block is fetched once
and its weight gradient stays in memory until it is complete. The number of
steps is a number of the plan: tiles without a slot cost nothing.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import numerics as nx
from kernels_pallas.matmul import pallas_tpu as dense

_BY_COLUMNS = (((1,), (0,)), ((), ()))
_BY_TRANSPOSED = (((1,), (1,)), ((), ()))
_OVER_ROWS = (((0,), (0,)), ((), ()))

_CLEAR, _BEGIN, _ADD = range(3)  # what a step of the weight gradient does


class Grouped:
  """Forward, row gradient and weight gradient; takes tiles in order of expert.

  ValueError is raised if the factors' dtypes differ, or if the depth of a
  product does not fit.
  """

  @staticmethod
  def forward(x, w, expert, numerics):
    """Returns float32 [R, F]."""
    return _product(x, w, expert, numerics, False)

  @staticmethod
  def backward_rows(g, w, expert, numerics):
    """Returns float32 [R, D], g Wᵀ."""
    return _product(g, w, expert, numerics, True)

  @staticmethod
  def backward_weights(x, g, expert, num_experts, numerics):
    """Returns float32 [E, D, F], Σ over the expert's tiles of xᵀ g."""
    dense.check_dtypes('x_RD and its cotangent', x, g)
    height = x.shape[0] // expert.shape[0]
    rows, columns = x.shape[1], g.shape[1]
    d = dense.split(rows, dense.COLUMNS)
    f = dense.split(columns, dense.COLUMNS)
    steps, *of_step = _visits(expert, num_experts)
    return pl.pallas_call(
        functools.partial(_weight_kernel, numerics=numerics),
        out_shape=jax.ShapeDtypeStruct((num_experts, rows, columns), nx.F32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(rows, d), pl.cdiv(columns, f), steps),
            in_specs=[
                pl.BlockSpec((height, d), lambda i, j, s, t, *_: (t[s], i)),
                pl.BlockSpec((height, f), lambda i, j, s, t, *_: (t[s], j)),
            ],
            out_specs=pl.BlockSpec(
                (None, d, f), lambda i, j, s, _, owner, __: (owner[s], i, j)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'arbitrary'),
            vmem_limit_bytes=dense.VMEM_BYTES,
        ),
        interpret=nx.interpret(),
        name='grouped_matmul_weights',
    )(*of_step, x, g)


def _product(x, w, expert, numerics, transposed):
  dense.check_dtypes('rows and w_EDF', x, w)
  num_experts, tiles = w.shape[0], expert.shape[0]
  height, depth = x.shape[0] // tiles, x.shape[1]
  columns = w.shape[1 if transposed else 2]
  width = dense.column_block(columns, depth, w.dtype.itemsize)
  used = (expert < num_experts).astype(jnp.int32).sum()
  if transposed:
    weights = pl.BlockSpec(
        (None, width, depth), lambda f, t, owner: (owner[t], f, 0)
    )
  else:
    weights = pl.BlockSpec(
        (None, depth, width), lambda f, t, owner: (owner[t], 0, f)
    )
  y = pl.pallas_call(
      functools.partial(
          _kernel,
          dims=_BY_TRANSPOSED if transposed else _BY_COLUMNS,
          numerics=numerics,
      ),
      out_shape=jax.ShapeDtypeStruct((x.shape[0], columns), nx.F32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(pl.cdiv(columns, width), used),
          in_specs=[
              pl.BlockSpec((height, depth), lambda f, t, owner: (t, 0)),
              weights,
          ],
          out_specs=pl.BlockSpec((height, width), lambda f, t, owner: (t, f)),
      ),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'arbitrary'),
          vmem_limit_bytes=dense.VMEM_BYTES,
      ),
      interpret=nx.interpret(),
      name='grouped_matmul_rows' if transposed else 'grouped_matmul',
  )(jnp.minimum(expert, num_experts - 1), x, w)
  # What no step has written; joins the rounding by the caller.
  written = jnp.arange(x.shape[0]) < used * height
  return jnp.where(written[:, None], y, 0)


def _kernel(owner_ref, x_ref, w_ref, y_ref, *, dims, numerics):
  del owner_ref
  y_ref[...] = numerics.dot(x_ref[...], w_ref[...], dims)


def _visits(expert, num_experts: int):
  """Lists the steps of the weight gradient: every expert is visited.

  An expert without a tile takes one step, to be cleared. There are no more
  steps than tiles, of which `plan` makes ⌊(Σ n_e - 1) / height⌋ + E: that is the
  largest value of Σ max(1, ⌈n_e / height⌉).

  Returns:
    The number of steps, and int32 [tiles] each: the tile of a step, its expert
    and what is to be done.
  """
  index = jnp.arange(num_experts)
  tiles_E = (expert[:, None] == index).astype(jnp.int32).sum(0)
  steps_E = jnp.maximum(tiles_E, 1)
  end_E = jnp.cumsum(steps_E)
  step = jnp.arange(expert.shape[0])
  owner = (step[:, None] >= end_E).astype(jnp.int32).sum(-1)
  owner = jnp.minimum(owner, num_experts - 1)
  rank = step - (end_E - steps_E)[owner]
  kind = jnp.where(rank == 0, _BEGIN, _ADD)
  kind = jnp.where(tiles_E[owner] == 0, _CLEAR, kind)
  # A step that clears has the next tile already, if there is one.
  last = jnp.maximum(tiles_E.sum(), 1) - 1
  tile = jnp.minimum((jnp.cumsum(tiles_E) - tiles_E)[owner] + rank, last)
  return end_E[-1], *(a.astype(jnp.int32) for a in (tile, owner, kind))


def _weight_kernel(
    tile_ref, owner_ref, kind_ref, x_ref, g_ref, dw_ref, *, numerics
):
  del tile_ref, owner_ref
  kind = kind_ref[pl.program_id(2)]

  @pl.when(kind == _CLEAR)
  def _():
    dw_ref[...] = jnp.zeros_like(dw_ref)

  @pl.when(kind == _BEGIN)
  def _():
    dw_ref[...] = numerics.dot(x_ref[...], g_ref[...], _OVER_ROWS)

  @pl.when(kind == _ADD)
  def _():
    dw_ref[...] += numerics.dot(x_ref[...], g_ref[...], _OVER_ROWS)
