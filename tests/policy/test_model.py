"""Parameters: shapes, axes, determinism; and what each kind of layer does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.numerics import unequal_bits
from agentic_rl.policy import config as config_lib
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import layout as layouts

AXES = {'layers', 'embed', 'heads', 'kv_heads', 'expert', 'expert_mlp', 'mlp'}
AXES |= {'vocab', None}


def make(**changes):
  fields = dict(
      vocab=40,
      width=32,
      layers=3,
      pattern='wbf',
      window=9,
      page=8,
      topk_pages=1,
      experts=4,
      expert_width=8,
      dense_width=24,
      max_context=64,
  )
  return config_lib.PolicyConfig(**(fields | changes))


FULL = dict(layers=4, dense_layers=1, shared_width=16, gating='sigmoid')
SINKS = dict(attention_sink=True, soft_cap=3.0, sink_page=True)


def shapes(cfg):
  return jax.tree.map(
      lambda a: a.shape, jax.eval_shape(lambda: model.init(cfg, 0))
  )


def quick_init(cfg):
  """Weights without the compiler: unit norms, no bias, normal matrices."""
  rng = np.random.default_rng(0)

  def make_leaf(path, leaf):
    name = jax.tree_util.keystr(path)
    if 'norm' in name:
      return np.ones(leaf.shape, np.float32)
    if 'sink' in name:
      return rng.normal(size=leaf.shape).astype(np.float32)
    scale = 0 if model.is_balance(path) else leaf.shape[-2] ** -0.5
    return (rng.normal(size=leaf.shape) * scale).astype(np.float32)

  shape = jax.eval_shape(lambda: model.init(cfg, 0))
  return jax.tree.map(jnp.asarray, jax.tree.map_with_path(make_leaf, shape))


def run(cfg, weights, tokens):
  return compiled(cfg)(weights, tokens)


@functools.cache
def compiled(cfg):
  positions = np.tile(np.arange(32, dtype=np.int32), (2, 1))

  def fun(weights, tokens):
    layout = layouts.row_layout(jnp.asarray(positions), cfg.page)
    return forward_lib.forward(weights, tokens, layout, cfg)[:2]

  return nx.jit(fun)


@pytest.fixture(scope='module')
def tokens():
  return jnp.asarray(np.random.default_rng(0).integers(0, 40, 64), jnp.int32)


@pytest.fixture(scope='module')
def full():
  """A config of every kind of layer, and its weights."""
  cfg = make(**FULL)
  return cfg, quick_init(cfg)


@pytest.fixture(scope='module')
def full_run(full, tokens):
  return run(*full, tokens)


@pytest.mark.parametrize(
    'cfg',
    [make(), make(**FULL, **SINKS), make(experts=0, tied=True)],
    ids=['experts', 'full', 'dense'],
)
def test_every_parameter_has_its_logical_axes(cfg):
  axes, sizes = model.logical_axes(cfg), shapes(cfg)
  is_axes = lambda v: v is None or isinstance(v, tuple)
  named = dict(jax.tree.leaves_with_path(axes, is_leaf=is_axes))
  sized = dict(jax.tree.leaves_with_path(sizes, is_leaf=is_axes))
  assert named.keys() == sized.keys()
  for path, shape in sized.items():
    if model.is_balance(path):
      assert named[path] == ('layers', None)  # whole on every device
      continue
    assert len(named[path]) == len(shape), path
    assert set(named[path]) <= AXES, path
    assert (named[path][0] == 'layers') == (path[0].key == 'pattern'), path


def test_init_is_a_function_of_the_seed():
  small = make(layers=1, pattern='f')
  one, again, other = (model.init(small, seed) for seed in (0, 0, 1))
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again)):
    assert unequal_bits(a, b) == 0
  assert unequal_bits(one['embedding'], other['embedding']) > 1000
  for leaf in jax.tree.leaves(one):
    assert leaf.dtype == small.numerics.storage
  queries = np.asarray(one['pattern'][0]['query'])
  assert abs(queries.std() * 32**0.5 - 1) < 0.1  # 1/√fan-in


def test_bfloat16_weights_are_rounded():
  cfg = make(layers=1, pattern='f', precision='bfloat16')
  weights = model.init(cfg, 0)
  for leaf in jax.tree.leaves(weights):
    rounded = np.asarray(leaf).astype(jnp.bfloat16).astype(leaf.dtype)
    assert unequal_bits(leaf, rounded) == 0


def test_shapes_by_hand():
  sizes = shapes(make())
  assert sizes['embedding'] == (40, 32)
  assert sizes['head'] == (32, 40)
  assert 'first' not in sizes
  assert len(sizes['pattern']) == 3
  layer = sizes['pattern'][1]
  assert layer['query'] == (1, 32, 32)
  assert layer['key_value'] == (1, 32, 32)  # 2 heads of 8, keys and values
  assert layer['expert_in'] == (1, 4, 32, 16)
  assert layer['expert_out'] == (1, 4, 8, 32)
  assert layer['balance'] == (1, 4)
  assert 'dense_in' not in layer
  assert 'sink' not in layer
  assert shapes(make(**SINKS))['pattern'][1]['sink'] == (1, 4)


def test_tied_head():
  cfg = make(tied=True)
  weights = quick_init(cfg)
  assert 'head' not in weights
  head = forward_lib.head(weights, cfg)
  assert unequal_bits(head, np.asarray(weights['embedding']).T) == 0
  untied = {'head': jnp.ones((2, 3))}
  assert forward_lib.head(untied, make()) is untied['head']


def test_first_dense_layers_and_shared_expert():
  sizes = shapes(make(**FULL))
  first, layer = sizes['first'][0], sizes['pattern'][0]
  assert first['dense_in'] == (32, 48)
  assert 'router' not in first
  assert layer['dense_in'] == (1, 32, 32)  # the shared expert, gate and up
  assert layer['router'] == (1, 32, 4)
  only = shapes(make(dense_layers=3))
  assert len(only['first']) == 3
  assert 'pattern' not in only


def test_forward_agrees_with_the_reference_ops(full, full_run, tokens):
  cfg, weights = full
  hidden, routes = full_run
  assert hidden.shape == (64, 32)
  assert routes.shape == (cfg.moe_layers, 64, cfg.topk_experts)
  expected, expected_routes = run(
      make(**FULL, impl='reference'), weights, tokens
  )
  np.testing.assert_array_equal(routes, expected_routes)
  np.testing.assert_allclose(hidden, expected, atol=2e-4)


def test_every_parameter_takes_part(tokens):
  """Each weight has a gradient; the routers' biases have none."""
  cfg = make(**(FULL | SINKS | dict(layers=2, pattern='b')))
  weights = quick_init(cfg)
  direction = np.random.default_rng(1).normal(size=(64, 32))

  def loss(w):
    layout = layouts.row_layout(jnp.arange(64).reshape(2, 32) % 32, cfg.page)
    x = forward_lib.forward(w, tokens, layout, cfg)[0]
    logits = x @ forward_lib.head(w, cfg)
    return (x * direction).sum() + logits.max(-1).sum()

  grads = nx.jit(jax.grad(loss))(weights)
  for path, leaf in jax.tree.leaves_with_path(grads):
    size = np.abs(np.asarray(leaf)).max()
    name = jax.tree_util.keystr(path)
    assert np.isfinite(size), name
    assert (size == 0) == model.is_balance(path), (name, size)


def test_sinks_move_the_output(full, full_run, tokens):
  """Each of the three does."""
  cfg, weights = full
  for name, value in SINKS.items():
    fields = FULL | {name: value}
    own = quick_init(make(**fields))
    if name != 'attention_sink':
      own = weights
    hidden = run(make(**fields), own, tokens)[0]
    assert np.abs(np.asarray(hidden - full_run[0])).max() > 1e-3, name


def test_bias_moves_the_choice_only(full, full_run, tokens):
  cfg, weights = full
  pattern = dict(weights['pattern'])
  pattern[2] = pattern[2] | {'balance': np.asarray([[0, 0, 9, 0]], np.float32)}
  _, routes = run(cfg, weights | {'pattern': pattern}, tokens)
  assert (np.asarray(routes[2]) == 2).any(-1).all()
  np.testing.assert_array_equal(routes[:2], full_run[1][:2])
  assert not (np.asarray(full_run[1][2]) == 2).any(-1).all()


def test_dense_policy_has_no_routes(tokens):
  cfg = make(experts=0, layers=1, pattern='w')
  hidden, routes = run(cfg, quick_init(cfg), tokens)
  assert hidden.shape == (64, 32)
  assert routes.shape == (0, 64, cfg.topk_experts)
