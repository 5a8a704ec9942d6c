"""Small kernels whose bundles the tests count: builders for `tpu_cost`."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

F32 = jnp.float32


def matmul(rows=256):
  """A tile of 128 rows of a product a grid step."""

  def kernel(x_ref, w_ref, y_ref):
    y_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=F32)

  fun = pl.pallas_call(
      kernel,
      grid=(rows // 128,),
      in_specs=[
          pl.BlockSpec((128, 256), lambda i: (i, 0)),
          pl.BlockSpec((256, 256), lambda i: (0, 0)),
      ],
      out_specs=pl.BlockSpec((128, 256), lambda i: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((rows, 256), F32),
      name='tiles',
  )
  x = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
  return fun, [x, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)]


def sums(loops=None, regions=None):
  """A sum of n[i] blocks for each i, written in the last of three steps."""

  def kernel(n_ref, x_ref, y_ref, sum_ref):
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _():
      sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(b, total):
      return total + jnp.exp(x_ref[pl.ds(b * 8, 8), :])

    zero = jnp.zeros((8, 128), F32)
    sum_ref[...] += jax.lax.fori_loop(0, n_ref[i], add, zero)[None]

    @pl.when(j == 2)
    def _():
      y_ref[...] = sum_ref[...]

  fun = pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(2, 3),
          in_specs=[pl.BlockSpec((512, 128), lambda i, j, n: (0, 0))],
          out_specs=pl.BlockSpec((72, 8, 128), lambda i, j, n: (i, 0, 0)),
          scratch_shapes=[pltpu.VMEM((72, 8, 128), F32)],
      ),
      out_shape=jax.ShapeDtypeStruct((144, 8, 128), F32),
      name='sums',
  )
  args = [
      jax.ShapeDtypeStruct((2,), jnp.int32),
      jax.ShapeDtypeStruct((512, 128), F32),
  ]
  return fun, args, {'sums': dict(loops=loops, regions=regions)}
