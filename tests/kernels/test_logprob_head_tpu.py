"""The log-prob head compiles for every chip."""

import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.logprob_head import ops
from kernels_pallas.logprob_head import pallas_tpu

NUM = nx.Numerics('bfloat16')
CASES = [
    (64, 1024, 32768),
    (2048, 1024, 32768),
    (2048, 1024, 50257),  # a last vocabulary tile that is not full
    (320, 1024, 50257),  # a last row tile that is not full
    (256, 4096, 50257),
]


def shapes(t, d, v):
  return [
      jax.ShapeDtypeStruct((t, d), jnp.bfloat16),
      jax.ShapeDtypeStruct((d, v), jnp.bfloat16),
      jax.ShapeDtypeStruct((t,), jnp.int32),
  ]


def logprobs(x, w, y):
  return ops.logprobs(x, w, y, temperature=0.9, numerics=NUM, impl='pallas')


def sample(x, w, seed):
  keys = jax.vmap(jax.random.key)(seed)
  return ops.sample(x, w, keys, temperature=0.9, numerics=NUM, impl='pallas')


def holds(compiled, size) -> bool:
  """Whether a program has an array of as many numbers."""
  for text in re.findall(r'\[([\d,]+)\]', compiled.as_text()):
    count = 1
    for n in text.split(','):
      count *= int(n)
    if count >= size:
      return True
  return False


every_chip = pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))
every_case = pytest.mark.parametrize(('t', 'd', 'v'), CASES)


@pytest.mark.tpu_compile
@every_chip
@every_case
def test_logprobs(chip, t, d, v):
  compiled = tpu_compiler.compile_for(logprobs, shapes(t, d, v), chip)
  assert compiled.as_text().count('tpu_custom_call') == 1


@pytest.mark.tpu_compile
@every_chip
@every_case
def test_gradient(chip, t, d, v):
  def loss(x, w, y):
    logp, entropy = logprobs(x, w, y)
    return (logp + 0.01 * entropy).sum()

  gradient = jax.value_and_grad(loss, (0, 1))
  compiled = tpu_compiler.compile_for(gradient, shapes(t, d, v), chip)
  assert compiled.as_text().count('tpu_custom_call') == 3
  if t > d:
    assert not holds(compiled, t * v)


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize(
    ('t', 'd', 'v'), [(64, 1024, 32768), (2048, 1024, 50257)]
)
def test_sample(chip, t, d, v):
  compiled = tpu_compiler.compile_for(sample, shapes(t, d, v), chip)
  assert compiled.as_text().count('tpu_custom_call') == 2
  if t > d:
    assert not holds(compiled, t * v)


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize('t', [64, 320])
def test_logits(chip, t):
  x, w, _ = shapes(t, 1024, 50257)
  fun = lambda x, w: pallas_tpu.logits(x, w, 0.9, NUM)
  compiled = tpu_compiler.compile_for(fun, [x, w], chip)
  assert compiled.as_text().count('tpu_custom_call') == 1
