"""The product of e4m3 numbers compiles for every chip."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.fp8_matmul import ops

NUM = nx.Numerics('bfloat16')


@pytest.mark.tpu_compile
@pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))
@pytest.mark.parametrize(
    ('t', 'd', 'f'),
    [(64, 1024, 3072), (2048, 1024, 3072), (2048, 3072, 1024), (64, 64, 64)],
)
def test_compiles(chip, t, d, f):
  run = lambda x, w: ops.fp8_matmul(x, w, numerics=NUM, impl='pallas')
  args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((t, d), (d, f))]
  text = tpu_compiler.compile_for(run, args, chip).as_text()
  assert text.count('tpu_custom_call') == 1
