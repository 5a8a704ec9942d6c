"""The dense product compiles for every chip."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.matmul import ops

NUM = nx.Numerics('bfloat16')


@pytest.mark.tpu_compile
@pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))
@pytest.mark.parametrize(
    ('t', 'd', 'f', 'dtype'),
    [
        (64, 1024, 3072, jnp.bfloat16),
        (2048, 1024, 3072, jnp.bfloat16),
        (2112, 3072, 1024, jnp.bfloat16),  # a short last row tile
        (64, 1024, 64, jnp.bfloat16),  # a router
        (256, 1024, 1000, jnp.float32),
        (256, 65536, 1024, jnp.bfloat16),  # eight tiles deep
    ],
)
def test_compiles(chip, t, d, f, dtype):
  run = lambda x, w: ops.matmul(x, w, numerics=NUM, impl='pallas')
  args = [jax.ShapeDtypeStruct(s, dtype) for s in ((t, d), (d, f))]
  text = tpu_compiler.compile_for(run, args, chip).as_text()
  assert text.count('tpu_custom_call') == 1
