"""Products of e4m3 numbers compile for every chip."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.fp8_matmul import ops
from kernels_pallas.grouped_matmul import ops as grouped_ops

NUM = nx.Numerics('fp8')


def of(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def kernels(fun, args, chip):
  """Returns how many Pallas kernels the compiled program has."""
  text = tpu_compiler.compile_for(fun, args, chip).as_text()
  assert 'f8e4m3fn' in text
  return text.count('tpu_custom_call')


@pytest.mark.tpu_compile
@pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))
@pytest.mark.parametrize(
    ('t', 'd', 'f'),
    [(64, 1024, 3072), (2048, 1024, 3072), (2048, 3072, 1024), (64, 64, 64)],
)
def test_compiles(chip, t, d, f):
  run = lambda x, w: ops.fp8_matmul(x, w, numerics=NUM, impl='pallas')
  assert kernels(run, (of(t, d), of(d, f)), chip) == 1


@pytest.mark.tpu_compile
@pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))
@pytest.mark.parametrize(
    ('slots', 'd', 'f', 'e'),
    [(512, 1024, 768, 64), (4096, 1024, 1536, 64), (16384, 768, 1024, 64)],
)
def test_grouped_and_gradients_compile(chip, slots, d, f, e):
  with nx.target('tpu'):
    tile = grouped_ops.group_tile(slots, e)
  rows = ((slots - 1) // tile + e) * tile

  def run(x_RD, w_EDF, experts_Tk):
    plan = grouped_ops.plan(experts_Tk, e)

    def rounded(x, w):
      product = ops.fp8_grouped_matmul
      return NUM.cast(product(x, w, plan, numerics=NUM, impl='pallas'))

    y, pull = jax.vjp(rounded, x_RD, w_EDF)
    return pull(y)

  args = of(rows, d), of(e, d, f), of(slots // 8, 8, dtype=jnp.int32)
  assert kernels(run, args, chip) == 3
