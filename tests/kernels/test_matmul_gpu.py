"""The dense product's GPU kernel, in the GPU interpreter.

What is shown here is that tiles come from and go to the right places, and that
nothing else of a row's neighbours reaches it. The order of the interpreter's
sums is its own: rows are compared on small integers, whose sums are exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.fp8_matmul import ops as fp8
from kernels_pallas.matmul import ops
from kernels_pallas.matmul import pallas_gpu
from kernels_pallas.matmul import reference
from tests.kernels import samples

NUM = samples.EXACT['bfloat16']
matmul = jax.jit(lambda x, w: pallas_gpu.matmul(x, w, NUM))


def draw(seed, *shape):
  return jnp.asarray(samples.normal(seed, shape, 'bfloat16'), jnp.bfloat16)


@pytest.mark.parametrize(
    ('t', 'd', 'f'),
    [
        (64, 64, 64),
        (128, 200, 136),  # all dimensions exceed a tile, two are padded
    ],
)
def test_against_reference(t, d, f):
  x, w = draw(0, t, d), draw(1, d, f)
  y = matmul(x, w)
  assert y.dtype == jnp.float32 and y.shape == (t, f)
  wide = [a.astype(jnp.float32) for a in (x, w)]
  samples.close(y, reference.matmul(*wide, NUM), scale=16)


def test_a_row_is_the_same_in_any_tile_and_company():
  w, x = samples.whole(1, 128, 64), np.asarray(samples.whole(0, 192, 128))
  y = np.asarray(matmul(jnp.asarray(x), w))
  moved = samples.nan_but((64, 128), {0: x[130], 17: x[3], 63: x[64]}, x.dtype)
  out = np.asarray(matmul(jnp.asarray(moved), w))
  samples.same_bits(out[[0, 17, 63]], y[[130, 3, 64]])
  assert np.isnan(out[1]).all()


@pytest.mark.parametrize('impl', ['pallas', 'auto'])
def test_float32_is_refused_and_auto_takes_xla(impl):
  args = jnp.ones((64, 8)), jnp.ones((8, 8))
  run = lambda: ops.matmul(*args, numerics=nx.Numerics(), impl=impl)
  with nx.target('gpu'):
    if impl == 'auto':
      np.testing.assert_array_equal(run(), 8)
    else:
      with pytest.raises(ValueError, match='float32 .* on gpu needs bfloat16'):
        run()


def test_ops_without_a_kernel_say_so():
  args = jnp.ones((64, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16)
  with nx.target('gpu'):
    with pytest.raises(ValueError, match='fp8.* on gpu: allowed are .*xla'):
      fp8.fp8_matmul(*args, numerics=NUM, impl='pallas')
