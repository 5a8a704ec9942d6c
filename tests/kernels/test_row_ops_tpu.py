"""The row operations compile for every chip."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.row_ops import ops

NUM = nx.Numerics('bfloat16')
BF16, F32 = jnp.bfloat16, jnp.float32
OPTIONS = dict(numerics=NUM, impl='pallas')


def compiles(chip, fun, *shapes):
  args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  text = tpu_compiler.compile_for(fun, args, chip).as_text()
  assert text.count('tpu_custom_call') == 1


every_chip = pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize(
    'shape',
    [
        (64, 1024),
        (2048, 1024),
        (2048, 1000),
        (64, 16, 64),
        (2048, 16, 64),
        (2048, 4, 96),
        (2048, 16, 128),
        (2048, 4, 256),
    ],
)
def test_norm(chip, shape):
  fun = lambda x, gain: ops.rms_norm(x, gain, **OPTIONS)
  compiles(chip, fun, (shape, BF16), (shape[-1:], BF16))


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize('tokens', [64, 2048])
@pytest.mark.parametrize(
    ('heads', 'width'), [(16, 64), (16, 128), (16, 256), (4, 64), (4, 128)]
)
def test_rope(chip, tokens, heads, width):
  fun = lambda x, p: ops.rope(x, p, **OPTIONS)
  compiles(chip, fun, ((tokens, heads, width), BF16), ((tokens,), jnp.int32))


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize('gating', ['softmax', 'sigmoid'])
@pytest.mark.parametrize(
    ('tokens', 'experts'), [(64, 64), (2048, 64), (2048, 256)]
)
def test_router(chip, tokens, experts, gating):
  fun = lambda x, b: ops.router(x, b, topk=8, gating=gating, **OPTIONS)
  compiles(chip, fun, ((tokens, experts), F32), ((experts,), F32))


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize('gating', ['softmax', 'sigmoid'])
def test_router_weights(chip, gating):
  fun = lambda x, e: ops.router_weights(x, e, gating=gating, **OPTIONS)
  compiles(chip, fun, ((2048, 256), F32), ((2048, 8), jnp.int32))


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize('shape', [(64, 512), (2048, 2816), (2048, 1000)])
def test_gate(chip, shape):
  fun = lambda gate, up: ops.swiglu(gate, up, **OPTIONS)
  compiles(chip, fun, (shape, BF16), (shape, BF16))
