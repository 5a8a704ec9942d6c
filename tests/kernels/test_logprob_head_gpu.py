"""The log-prob head's GPU kernels, in the GPU interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.logprob_head import pallas_gpu
from kernels_pallas.logprob_head import pallas_tpu
from kernels_pallas.logprob_head import xla
from tests.kernels import samples

NUM, WIDE = samples.EXACT['bfloat16'], samples.EXACT['float32']
# Two spans of the vocabulary, the last one with a short tile.
ROWS, WIDTH, VOCAB, TEMPERATURE = 64, 24, 300, 0.7


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
  monkeypatch.setattr(pallas_gpu, 'SPAN_TILES', 2)
  monkeypatch.setattr(pallas_gpu, 'CHUNK', 256)


def case():
  """Returns bfloat16 rows and head, and targets."""
  x = samples.normal(0, (ROWS, WIDTH), 'bfloat16')
  w = samples.normal(1, (WIDTH, VOCAB), 'bfloat16', scale=0.3)
  y = np.random.default_rng(2).integers(0, VOCAB, ROWS)
  x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w))
  return x, w, jnp.asarray(y, jnp.int32)


def wide(*arrays):
  return [a.astype(jnp.float32) for a in arrays]


def test_values_and_bits():
  x, w, y = case()
  run = jax.jit(lambda x, y: pallas_gpu.logprobs(x, w, y, TEMPERATURE, NUM))
  ours = run(x, y)
  for a, b in zip(ours, xla.logprobs(*wide(x, w), y, TEMPERATURE, WIDE)):
    samples.close(a, b)
  # A row is the same at another place, between rows of NaN.
  few = samples.nan_but((ROWS, WIDTH), {40: np.asarray(x[3])}, x.dtype)
  for a, b in zip(run(jnp.asarray(few), y.at[40].set(y[3])), ours):
    samples.same_bits(np.asarray(a)[40], np.asarray(b)[3])


def test_gradients():
  x, w, y = case()
  g = jnp.asarray(samples.normal(3, (2, ROWS)))
  _, _, lse, mean = pallas_tpu.forward(*wide(x, w), y, TEMPERATURE, WIDE)
  ours = pallas_gpu.backward(x, w, y, lse, mean, *g, TEMPERATURE, NUM)
  expected = xla.backward(*wide(x, w), y, *g, TEMPERATURE, WIDE)
  assert ours[1].dtype == jnp.bfloat16
  samples.close(ours[0], expected[0])
  samples.close(ours[1].astype(jnp.float32), expected[1], 'bfloat16')


@pytest.mark.parametrize(
    'greedy', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_draws(greedy):
  x, w, _ = case()
  keys = jax.random.split(jax.random.key(5), ROWS)
  noise = 0.5
  tokens = pallas_gpu.draw(x, w, keys, TEMPERATURE, noise, greedy, NUM)
  z = xla.logits(*wide(x, w), TEMPERATURE, WIDE)
  if not greedy:
    gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (VOCAB,)))(keys)
    z = z + gumbel * noise
  np.testing.assert_array_equal(tokens, jnp.argmax(z, -1))


def test_what_is_refused():
  x, w, y = case()
  with pytest.raises(ValueError, match='float32 .* needs bfloat16'):
    pallas_gpu.logprobs(*wide(x, w), y, TEMPERATURE, NUM)
  keys = jax.random.split(jax.random.key(0, impl='rbg'), ROWS)
  with pytest.raises(ValueError, match='keys_T of .*rbg'):
    pallas_gpu.draw(x, w, keys, TEMPERATURE, 1.0, False, NUM)
