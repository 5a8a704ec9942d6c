"""The row operations' GPU kernels, in the GPU interpreter.

It runs what `test_gpu_compile` compiles, but for how numbers lie in registers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.row_ops import pallas_gpu
from kernels_pallas.row_ops import xla
from tests.kernels import samples

NUM = samples.EXACT['bfloat16']


def draw(seed, *shape):
  return jnp.asarray(samples.normal(seed, shape, 'bfloat16'))


def rms_norm(module, x):
  return module.rms_norm(x, draw(9, x.shape[-1]), 1e-6, NUM)


def rope(module, x):
  positions = jnp.asarray(np.arange(len(x)) * 37 % 1000, jnp.int32)
  return module.rope(x, positions, 1e4, NUM)


def swiglu(module, x):
  return module.swiglu(x, x[:, ::-1], NUM)


def softmax(module, x):
  bias = jnp.zeros(x.shape[1])
  return module.router(x.astype(jnp.float32), bias, 3, 'softmax', NUM)


def sigmoid(module, x):
  bias = draw(8, x.shape[1])
  return module.router(x.astype(jnp.float32), bias, 2, 'sigmoid', NUM)


@pytest.mark.parametrize(
    ('op', 'shape'),
    [
        (rms_norm, (70, 100)),  # two blocks of rows, two tiles of columns
        pytest.param(rms_norm, (4, 3, 16), marks=pytest.mark.slow),
        (rope, (20, 2, 16)),
        (swiglu, (20, 100)),
        (softmax, (20, 7)),
        (sigmoid, (20, 7)),
    ],
)
def test_values_and_bits(op, shape):
  """As XLA's path; a row is the same in other company."""
  x = draw(0, *shape)
  run = jax.jit(functools.partial(op, pallas_gpu))
  ours, expected = run(x), op(xla, x)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected)):
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype == jnp.int32:
      np.testing.assert_array_equal(a, b)
    else:
      samples.close(a, b, 'bfloat16')
  mine = np.zeros((len(x), *[1] * (x.ndim - 1)), bool)
  rows = [1, 3]
  mine[rows] = True
  few = run(jnp.where(mine, x, jnp.nan))
  for a, b in zip(jax.tree.leaves(few), jax.tree.leaves(ours)):
    samples.same_bits(np.asarray(a)[rows], np.asarray(b)[rows])


@pytest.mark.parametrize('gating', ['softmax', 'sigmoid'])
def test_the_weights_of_given_experts_are_those_of_the_router(gating):
  logits = draw(0, 20, 7)
  weights, experts = pallas_gpu.router(logits, draw(8, 7), 2, gating, NUM)
  again = pallas_gpu.router_weights(logits, experts, gating, NUM)
  samples.same_bits(again, weights)


def test_a_router_of_nan_and_of_equals():
  logits = jnp.zeros((64, 5)).at[1].set(jnp.nan).at[2, 1:3].set(1)
  _, experts = pallas_gpu.router(logits, jnp.zeros(5), 4, 'softmax', NUM)
  expected = [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 0, 3]]
  np.testing.assert_array_equal(experts[:3], expected)


def test_what_is_refused():
  logits = jnp.zeros((64, 300))
  with nx.target('gpu'):
    with pytest.raises(ValueError, match=r'\(64, 2, 16\): .* multiple of 64'):
      rope(pallas_gpu, draw(0, 64, 2, 16))
    with pytest.raises(ValueError, match=r'\(64, 300\): .* at most 256'):
      pallas_gpu.router(logits, jnp.zeros(300), 2, 'softmax', NUM)
