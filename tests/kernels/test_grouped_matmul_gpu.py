"""The grouped product's GPU kernels, in the GPU interpreter.

It does not know transposed tiles in shared memory (`TransposeTransform`), so
that the gradients' kernels get their factors transposed here; those that are
launched on a GPU only compile, in `test_gpu_compile`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.grouped_matmul import ops
from kernels_pallas.grouped_matmul import pallas_gpu
from kernels_pallas.grouped_matmul import reference
from tests.kernels import samples

NUM = samples.EXACT['bfloat16']
EXPERTS, D, F = 4, 72, 40
# Expert 1 has no slot, expert 2 has more than a tile.
CHOICES = np.asarray([[0, 2]] * 40 + [[2, 3]] * 30)


def draw(seed, *shape):
  return jnp.asarray(samples.normal(seed, shape, 'bfloat16'), jnp.bfloat16)


@functools.cache
def case():
  plan = ops.plan(jnp.asarray(CHOICES), EXPERTS, tile=64)
  used = (np.asarray(plan.slot_of_row_R) < CHOICES.size)[:, None]
  rows = used.shape[0]
  x, g = (jnp.where(used, draw(i, rows, n), 0) for i, n in ((0, D), (1, F)))
  assert list(plan.expert_of_tile) == [0, 2, 2, 3, 4, 4]
  return x, g, draw(2, EXPERTS, D, F), plan.expert_of_tile


@pytest.mark.parametrize(
    'name', ['forward', 'backward_rows', 'backward_weights']
)
def test_against_reference(name):
  x, g, w, expert = case()
  args = {
      'forward': (x, w, expert),
      'backward_rows': (g, w, expert),
      'backward_weights': (x, g, expert, EXPERTS),
  }[name]
  y = getattr(pallas_gpu.Grouped, name)(*args, NUM)
  wide = [
      a.astype(jnp.float32) if getattr(a, 'dtype', 0) == jnp.bfloat16 else a
      for a in args
  ]
  expected = getattr(reference.Grouped, name)(*wide, NUM)
  assert y.dtype == jnp.float32
  assert y.shape == expected.shape
  samples.close(y, expected, scale=16)


def test_a_row_is_the_same_in_any_tile_and_company():
  # Of integers: the interpreter's sums have an order of their own.
  x, w = samples.whole(0, 128, D), samples.whole(1, EXPERTS, D, F)
  forward = jax.jit(lambda x, e: pallas_gpu.Grouped.forward(x, w, e, NUM))
  y = np.asarray(forward(x, jnp.asarray([2, 3])))
  moved = samples.nan_but(
      (128, D), {5: np.asarray(x[70]), 64: np.asarray(x[3])}, x.dtype
  )
  out = np.asarray(forward(jnp.asarray(moved), jnp.asarray([3, 2])))
  samples.same_bits(out[[5, 64]], y[[70, 3]])


def test_what_is_refused():
  x, _, w, expert = case()
  with pytest.raises(ValueError, match='float32 .* needs bfloat16'):
    pallas_gpu.Grouped.forward(x.astype(jnp.float32), w, expert, NUM)
  with nx.target('gpu'):
    assert ops.group_tile(64, 1) % 64 == 0
    with pytest.raises(ValueError, match='tiles of 32 rows'):
      pallas_gpu.Grouped.forward(x[:64], w, expert[:2], NUM)
