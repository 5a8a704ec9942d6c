"""Dense product of e4m3 numbers on the MXU, scaled block by block.

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
    x: float8 [T, D].
    x_scale: float32 [T, 1].
    w: float8 [D, F].
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
