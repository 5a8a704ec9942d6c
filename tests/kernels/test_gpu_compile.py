"""Every GPU kernel compiles for Hopper, and nothing of it spills.

Needs the compiler, see `kernels_pallas.gpu_compiler`, and no GPU:

  pytest -m gpu_compile tests/kernels
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import gpu_compiler
from kernels_pallas import numerics as nx
from kernels_pallas.grouped_matmul import ops as grouped
from kernels_pallas.matmul import ops as dense

pytestmark = pytest.mark.gpu_compile
CHIP = 'h100'
NUM = nx.Numerics('bfloat16')


@functools.cache
def missing():
  try:
    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    gpu_compiler.compile_for(lambda x: x + 1, [struct], CHIP)
  except RuntimeError as error:
    return str(error)
  return ''


@pytest.fixture(autouse=True)
def compiler():
  if missing():
    pytest.skip(missing())


def struct(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def check(run, args, kernels):
  """Compiles; asserts how many kernels there are and that none spills."""
  compiled, found = gpu_compiler.compile_and_count(run, args, CHIP)
  for name, resources in found.items():
    print(f'{name}: {resources}')
    assert resources.spill_bytes == 0
    assert resources.registers <= 255
  assert compiled.as_text().count('custom_call_target="mosaic_gpu') == kernels


@pytest.mark.parametrize(
    ('t', 'd', 'f'),
    [
        (64, 1024, 3072),
        (2048, 1024, 3072),
        (2112, 3072, 1024),  # a short last row tile
        (64, 1024, 64),  # a router
        (256, 1000, 1000),  # padded
    ],
)
def test_matmul(t, d, f):
  run = lambda x, w: dense.matmul(x, w, numerics=NUM, impl='pallas')
  check(run, [struct(t, d), struct(d, f)], kernels=1)


@pytest.mark.parametrize(
    ('slots', 'd', 'f', 'e'),
    [
        (4096, 1024, 768, 64),
        (4096, 1024, 1536, 64),  # gate and up in one
        (512, 1024, 768, 64),  # a step of the sampler
    ],
)
def test_grouped_matmul(slots, d, f, e):
  def run(x_RD, w_EDF, experts_Tk):
    plan = grouped.plan(experts_Tk, e)

    def rounded(x, w):
      y = grouped.grouped_matmul(x, w, plan, numerics=NUM, impl='pallas')
      return NUM.cast(y)

    y, pull = jax.vjp(rounded, x_RD, w_EDF)
    return y, pull(y)

  with nx.target('gpu'):
    tile = grouped.group_tile(slots, e)
  rows = ((slots - 1) // tile + e) * tile
  experts = struct(slots // 8, 8, dtype=jnp.int32)
  check(run, [struct(rows, d), struct(e, d, f), experts], kernels=3)


def test_xla_compiles_for_every_chip():
  run = lambda x, w: dense.matmul(x, w, numerics=NUM)
  for chip in gpu_compiler.CHIPS:
    args = [struct(128, 256), struct(256, 64)]
    assert 'mosaic' not in gpu_compiler.compile_for(run, args, chip).as_text()


def test_an_unknown_chip_is_named():
  with pytest.raises(ValueError, match="chip='v5e': allowed are .*'h100'"):
    gpu_compiler.compile_for(lambda x: x, [struct(8)], 'v5e')
