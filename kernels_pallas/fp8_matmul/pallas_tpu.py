"""Products of e4m3 numbers on the MXU, scaled block by block.

Factors come from memory as 8 bits and are widened to bfloat16, which holds
every e4m3 number, in the kernel: of the chips only tpu7x multiplies e4m3.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import numerics as nx
from kernels_pallas.matmul import pallas_tpu as dense

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def matmul(x, x_scale, w, w_scale, numerics):
  """Returns float32 [T, F].

  Args:
    x: e4m3 [T, D].
    x_scale: float32 [T, 1].
    w: e4m3 [D, F].
    w_scale: float32 [blocks of D, blocks of F].
    numerics: summation rules.

  Raises:
    ValueError: on a depth that does not fit.
  """
  rows, depth = x.shape
  columns, blocks = w.shape[1], w_scale.shape[0]
  width = dense.column_block(columns, depth, 2)
  height = dense.row_tile(rows, depth, 2)
  # One scale a column: the vector unit can not repeat them by itself.
  w_scale = jnp.repeat(w_scale, columns // w_scale.shape[1], 1)
  return pl.pallas_call(
      functools.partial(_kernel, numerics=numerics),
      out_shape=jax.ShapeDtypeStruct((rows, columns), nx.F32),
      # A weight block stays while the row tiles pass.
      grid=(pl.cdiv(columns, width), pl.cdiv(rows, height)),
      in_specs=[
          pl.BlockSpec((height, depth), lambda f, t: (t, 0)),
          pl.BlockSpec((height, 1), lambda f, t: (t, 0)),
          pl.BlockSpec((depth, width), lambda f, t: (0, f)),
          pl.BlockSpec((blocks, width), lambda f, t: (0, f)),
      ],
      out_specs=pl.BlockSpec((height, width), lambda f, t: (t, f)),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'parallel'),
          vmem_limit_bytes=dense.VMEM_BYTES,
      ),
      interpret=nx.interpret(),
      name='fp8_matmul',
  )(x, x_scale, w, w_scale)


def grouped(x, x_scale, w, w_scale, expert, numerics):
  """Returns float32 [R, F]; tiles without a slot cost nothing.

  Args:
    x: e4m3 [R, D].
    x_scale: float32 [R, 1].
    w: e4m3 [E, D, F].
    w_scale: float32 [E, blocks of D, blocks of F].
    expert: int32 [tiles], ascending, E for those without a slot.
    numerics: summation rules.

  Raises:
    ValueError: on a depth that does not fit.
  """
  num_experts, blocks = w_scale.shape[:2]
  tiles, columns = expert.shape[0], w.shape[2]
  height, depth = x.shape[0] // tiles, x.shape[1]
  width = dense.column_block(columns, depth, 2)
  w_scale = jnp.repeat(w_scale, columns // w_scale.shape[2], 2)
  used = (expert < num_experts).astype(jnp.int32).sum()
  by_owner = lambda f, t, owner: (owner[t], 0, f)
  y = pl.pallas_call(
      functools.partial(_grouped_kernel, numerics=numerics),
      out_shape=jax.ShapeDtypeStruct((x.shape[0], columns), nx.F32),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          # The tiles of an expert follow each other: its block stays.
          grid=(pl.cdiv(columns, width), used),
          in_specs=[
              pl.BlockSpec((height, depth), lambda f, t, owner: (t, 0)),
              pl.BlockSpec((height, 1), lambda f, t, owner: (t, 0)),
              pl.BlockSpec((None, depth, width), by_owner),
              pl.BlockSpec((None, blocks, width), by_owner),
          ],
          out_specs=pl.BlockSpec((height, width), lambda f, t, owner: (t, f)),
      ),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'arbitrary'),
          vmem_limit_bytes=dense.VMEM_BYTES,
      ),
      interpret=nx.interpret(),
      name='fp8_grouped_matmul',
  )(jnp.minimum(expert, num_experts - 1), x, x_scale, w, w_scale)
  # What no step has written.
  written = jnp.arange(x.shape[0]) < used * height
  return jnp.where(written[:, None], y, 0)


def _grouped_kernel(owner_ref, *refs, numerics):
  del owner_ref
  _kernel(*refs, numerics=numerics)


def _kernel(x_ref, x_scale_ref, w_ref, w_scale_ref, y_ref, *, numerics):
  wide = nx.F32 if nx.interpret() else jnp.bfloat16
  blocks = w_scale_ref.shape[0]
  length = w_ref.shape[0] // blocks

  def part(b):
    inner = pl.ds(pl.multiple_of(b * length, length), length)
    product = numerics.dot(
        x_ref[:, inner].astype(wide),
        w_ref[inner, :].astype(wide),
        _ROWS_BY_COLUMNS,
    )
    scale = x_scale_ref[...] * w_scale_ref[pl.ds(b, 1), :]
    return numerics.keep(product * scale)

  def step(b, _):
    y_ref[...] += part(b)

  y_ref[...] = part(0)
  lax.fori_loop(1, blocks, step, None)
