"""No program of the forward leaves the order of a float sum to XLA."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl import numerics
from agentic_rl.policy import config as config_lib
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from kernels_pallas import numerics as nx
from kernels_pallas.fp8_matmul import ops as fp8
from kernels_pallas.logprob_head import ops as head_ops
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.row_ops import ops as rows

KERNELS = pathlib.Path(nx.__file__).parent
SMALL = dict(
    vocab=64,
    width=32,
    layers=6,
    pattern='wbf',
    window=20,
    page=16,
    topk_pages=2,
    experts=4,
    expert_width=16,
    dense_width=24,
    max_context=64,
)
VARIANTS = {
    'experts': dict(),
    'dense': dict(experts=0, tied=True),
    'shared': dict(
        layers=7,
        dense_layers=1,
        shared_width=16,
        gating='sigmoid',
        precision='bfloat16',
        remat=True,
        attention_sink=True,
        soft_cap=5.0,
        sink_page=True,
    ),
    'fp8': dict(precision='fp8', layers=4, dense_layers=1),
}
TOKENS, TILES, POOL = 64, 24, 8


def make(variant, **changes):
  return config_lib.PolicyConfig(**(SMALL | VARIANTS[variant] | changes))


def learner(cfg):
  """(weights, tokens) -> log-probs, on packed rows."""
  layout = layouts.row_layout(
      jnp.tile(jnp.arange(64, dtype=jnp.int32), (2, 1)), cfg.page
  )

  def run(weights, tokens):
    x, routes, _ = forward_lib.forward(weights, tokens, layout, cfg)
    logp, entropy = head_ops.logprobs(
        x,
        forward_lib.head(weights, cfg),
        tokens,
        temperature=1.0,
        numerics=cfg.numerics,
        impl=cfg.impl,
    )
    return logp, entropy, routes

  return run, 128


def sampler(cfg):
  """(weights, tokens) -> drawn tokens and pool, one step on a pool."""
  index = lambda *shape: jnp.zeros(shape, jnp.int32)

  def run(weights, tokens):
    layout = layouts.Layout(
        index(TOKENS),
        index(TOKENS),
        index(4, cfg.pages_per_sequence),
        index(TILES, layouts.QUERY_TILE),
        index(TOKENS),
    )
    writes = forward_lib.Writes(index(TOKENS), index(TOKENS), index(4))
    pool = forward_lib.init_pool(cfg, POOL)
    x, routes, pool = forward_lib.forward(
        weights, tokens, layout, cfg, pool, writes
    )
    drawn = head_ops.sample(
        x,
        forward_lib.head(weights, cfg),
        jax.random.split(jax.random.key(0), TOKENS),
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        forced_T=index(TOKENS) - 1,
        numerics=cfg.numerics,
        impl=cfg.impl,
    )
    return drawn, routes, pool

  return run, TOKENS


def lowered(form, cfg):
  run, count = form(cfg)
  weights = jax.eval_shape(lambda: model.init(cfg, 0))
  tokens = jax.ShapeDtypeStruct((count,), jnp.int32)
  return nx.jit(run, exact=cfg.exact).lower(weights, tokens).as_text()


@pytest.mark.parametrize('form', [learner, sampler])
@pytest.mark.parametrize(
    ('variant', 'impl'),
    [
        *((name, 'xla') for name in VARIANTS),
        ('shared', 'pallas'),
        pytest.param('experts', 'pallas', marks=pytest.mark.slow),
        pytest.param('dense', 'pallas', marks=pytest.mark.slow),
    ],
)
def test_the_forward_fixes_every_sum(form, variant, impl):
  text = lowered(form, make(variant, impl=impl))
  assert 'stablehlo.dot_general' in text
  assert 'stablehlo.reduce(' in text  # maxima and integer counts are fine
  assert numerics.order_sensitive_reductions(text) == []


def op(name, impl):
  """(fun, shapes) of an op that the policies above do not use so."""
  num = nx.Numerics()
  if name == 'fp8_matmul':
    fun = lambda x, w: fp8.fp8_matmul(x, w, numerics=num, impl=impl)
    return fun, [(64, 256), (256, 128)]
  if name.startswith('router'):
    gating = name.partition(' ')[2]
    fun = lambda z, b: rows.router(
        z, b, topk=2, gating=gating, numerics=num, impl=impl
    )
    return fun, [(64, 4), (4,)]
  options = dict(
      sample=dict(),
      greedy=dict(noise=0.0),
      top_k=dict(top_k=5),
      top_p=dict(top_p=0.5),
  )[name]
  keys = jax.random.split(jax.random.key(0), 64)
  fun = lambda x, w: head_ops.sample(
      x, w, keys, temperature=0.7, numerics=num, impl=impl, **options
  )
  return fun, [(64, 32), (32, 600)]


@pytest.mark.parametrize('impl', ['xla', 'pallas'])
@pytest.mark.parametrize(
    'name',
    [
        'fp8_matmul', 'router softmax', 'router sigmoid', 'sample', 'greedy',
        'top_k', 'top_p',
    ],
)  # fmt: skip
def test_so_does_each_other_op(name, impl):
  fun, shapes = op(name, impl)
  assert found(fun, *shapes) == []


def test_no_op_is_forgotten():
  """A new op folder belongs into a policy or into `op` above."""
  folders = {p.parent.name for p in KERNELS.glob('*/ops.py')}
  assert folders == {
      'block_selection', 'fp8_matmul', 'grouped_matmul', 'logprob_head',
      'matmul', 'paged_attention', 'row_ops',
  }  # fmt: skip


@pytest.mark.parametrize('form', [learner, sampler])
def test_the_control_arm_does_not(form):
  text = lowered(form, make('experts', exact=False))
  found = numerics.order_sensitive_reductions(text)
  assert len(found) >= 4
  assert all('stablehlo.reduce' in line for line in found)


def test_so_does_the_reference():
  text = lowered(learner, make('experts', impl='reference'))
  assert numerics.order_sensitive_reductions(text)


# The lint itself.


def found(fun, *shapes, dtype=jnp.float32):
  args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
  text = jax.jit(fun).lower(*args).as_text()
  return numerics.order_sensitive_reductions(text)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ('fun', 'count'),
    [
        (lambda x: x.sum(), 1),
        (lambda x: x.mean(-1) + x.sum(0)[0], 2),
        (lambda x: x.prod(), 1),
        (lambda x: jnp.cumsum(x, -1), 1),
        (lambda x: jax.nn.softmax(x, -1), 1),
        (lambda x: x.at[jnp.asarray([1, 1])].add(x[0]), 1),
        (lambda x: jax.lax.map(lambda r: r.sum(), x), 1),
        (
            lambda x: jax.lax.reduce(
                x, x.dtype.type(0), lambda a, b: a + b * 2, (0,)
            ),
            1,
        ),
    ],
)
def test_lint_finds(fun, count, dtype):
  assert len(found(fun, (4, 8), dtype=dtype)) == count


@pytest.mark.parametrize(
    'fun',
    [
        lambda x: x + x * 2,
        lambda x: x.max(-1) + x.min(-1),
        lambda x: jnp.argmax(x, -1),
        lambda x: jax.lax.top_k(x, 2),
        lambda x: jnp.argsort(x, -1),
        lambda x: (x > 0).astype(jnp.int32).sum(),
        lambda x: jnp.cumsum((x > 0).astype(jnp.int32), -1),
        lambda x: (x > 0).any(-1),
        lambda x: jnp.matmul(x, x.T, precision='highest'),
        lambda x: x.at[jnp.asarray([1, 2])].set(x[0]),
        lambda x: jnp.zeros(9, jnp.int32).at[jnp.asarray([1, 1])].add(2),
        lambda x: nx.Numerics().tree_sum(x),
        # A float sum beside a reduction is not in it.
        lambda x: (x.max(-1) + x[:, 0], x + x),
    ],
)
def test_lint_lets_pass(fun):
  assert found(fun, (4, 8)) == []


def test_lint_wants_a_module():
  with pytest.raises(ValueError, match="lowered_text='x = 1': expected"):
    numerics.order_sensitive_reductions('x = 1')


# The count of bits.


def test_unequal_bits():
  count = numerics.unequal_bits
  a = np.asarray([1.0, 0.0, np.nan, np.inf, 2.0], np.float32)
  assert count(a, a.copy()) == 0
  b = np.asarray([1.0, -0.0, np.nan, np.inf, 2.0], np.float32)
  assert count(a, b) == 1
  assert count(a, np.nextafter(a, np.float32(9))) == 4  # all but NaN
  assert count(jnp.asarray(a), a) == 0
  assert count(a[::2], a[::2]) == 0
  assert count(a.reshape(5, 1).T, a.reshape(1, 5)) == 0
  assert count(np.float32(1), np.float32(2)) == 1
  assert count(np.zeros((0, 3)), np.zeros((0, 3))) == 0
  half = jnp.asarray([1.0, 2.0], jnp.bfloat16)
  assert count(half, half * 1.01) == 2
  assert count(half, half) == 0
  other_nan = a.view(np.uint32).copy()
  other_nan[2] ^= 1
  assert count(a, other_nan.view(np.float32)) == 1


@pytest.mark.parametrize(
    ('a', 'b', 'match'),
    [
        (np.zeros(2), np.zeros(3), r'float64\[2\] and b float64\[3\]'),
        (np.zeros(2), np.zeros(2, np.float32), 'b float32'),
        (np.zeros(2, int), np.zeros(2, int), 'dtype int64: floats'),
    ],
)
def test_unequal_bits_bad_input(a, b, match):
  with pytest.raises(ValueError, match=match):
    numerics.unequal_bits(a, b)
