"""The grouped product and both gradients compile for every chip."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.grouped_matmul import ops

NUM = nx.Numerics('bfloat16')
SHAPES = [  # slots T·topk, D, F, E
    (4096, 1024, 768, 64),
    (4096, 2048, 768, 64),
    (4096, 1024, 1536, 64),  # gate and up in one
    (512, 1024, 768, 64),  # a step of the sampler
    (16384, 1024, 768, 64),  # tiles of 256 rows
]


def grouped(x_RD, w_EDF, experts_Tk):
  plan = ops.plan(experts_Tk, w_EDF.shape[0])
  return ops.grouped_matmul(x_RD, w_EDF, plan, numerics=NUM, impl='pallas')


def arguments(slots, d, f, e):
  with nx.target('tpu'):
    tile = ops.group_tile(slots, e)
  rows = ((slots - 1) // tile + e) * tile
  return (
      jax.ShapeDtypeStruct((rows, d), jnp.bfloat16),
      jax.ShapeDtypeStruct((e, d, f), jnp.bfloat16),
      jax.ShapeDtypeStruct((slots // 8, 8), jnp.int32),
  )


@pytest.mark.tpu_compile
@pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))
@pytest.mark.parametrize('shape', SHAPES)
def test_forward(chip, shape):
  text = tpu_compiler.compile_for(grouped, arguments(*shape), chip).as_text()
  assert text.count('tpu_custom_call') == 1


@pytest.mark.tpu_compile
@pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))
@pytest.mark.parametrize('shape', SHAPES)
def test_gradients(chip, shape):
  def run(x_RD, w_EDF, experts_Tk):
    def rounded(x, w):
      return NUM.cast(grouped(x, w, experts_Tk))

    y, pull = jax.vjp(rounded, x_RD, w_EDF)
    return pull(y)

  text = tpu_compiler.compile_for(run, arguments(*shape), chip).as_text()
  assert text.count('tpu_custom_call') == 3
