import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.policy import model
from kernels_pallas import numerics as nx
from tests.rollout import samples

CFG = samples.config(shared_width=8, layers=5, dense_layers=1, dense_width=24)


@pytest.fixture(scope='module')
def weights():
  return samples.weights(CFG)


@pytest.fixture(scope='module')
def grads():
  return jax.tree.map(lambda a: 0.01 * a, samples.weights(CFG, 1))


def updates(rule, weights, *steps):
  """Returns the updates of some steps, compiled as one program."""

  def run(weights, steps):
    state, out = rule.init(weights), []
    for grads in steps:
      change, state = rule.update(grads, state, weights)
      weights = optax.apply_updates(weights, change)
      out.append(change)
    return out

  return jax.jit(run)(weights, steps)


def make(name, **options):
  return optimizer_lib.make(
      name, **dict(learning_rate=0.1, steps=10, clip_norm=1e9) | options
  )


def test_muon_of_a_stack_is_muon_of_each_matrix(weights, grads):
  rule = make('muon')
  matrices = {
      k: (weights['pattern'][1][k], grads['pattern'][1][k])
      for k in ('query', 'key_value', 'output', 'expert_in', 'dense_in')
  }
  whole = updates(
      rule,
      {k: w for k, (w, _) in matrices.items()},
      *[{k: g for k, (_, g) in matrices.items()}] * 2,
  )
  single, given = {}, {}
  for name, (w, g) in matrices.items():
    for i in np.ndindex(w.shape[:-2]):
      key = f'{name}{i}'
      single[key], given[key] = {name: w[i]}, {name: g[i]}
  each = updates(rule, single, given, given)
  for step in range(2):
    for name, (w, _) in matrices.items():
      for i in np.ndindex(w.shape[:-2]):
        a, b = whole[step][name][i], each[step][f'{name}{i}'][name]
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_muon_moves_matrices_along_an_orthogonal_direction(weights, grads):
  (change,) = updates(make('muon'), weights, grads)
  for name in ('query', 'expert_in', 'expert_out', 'dense_in', 'dense_out'):
    for m in np.asarray(change['pattern'][0][name]).reshape(
        -1, *change['pattern'][0][name].shape[-2:]
    ):
      s = np.linalg.svd(m, compute_uv=False)
      s = s[s > 1e-3 * s[0]]
      assert s.max() / s.min() < 3.5, name  # Newton-Schulz, not exact
      # Root mean square 0.2 x rate, as Adam would move it.
      assert 0.1 < np.sqrt((m**2).mean()) / (0.2 * 0.1) < 1.4, name


def test_adam_serves_all_that_is_no_matrix_of_a_layer(weights, grads):
  (muon,) = updates(make('muon'), weights, grads)
  nesterov = optax.adamw(0.1, b2=0.95, weight_decay=0.0, nesterov=True)
  (adam,) = updates(nesterov, weights, grads)
  same, other = set(), set()
  for (path, a), b in zip(
      jax.tree.leaves_with_path(muon), jax.tree.leaves(adam)
  ):
    equal = np.allclose(a, b, atol=1e-5)
    (same if equal else other).add(path[-1].key)
  # A router is a matrix of E columns, no more than a vector for each expert.
  assert same | {'balance'} == {
      'embedding', 'head', 'final_norm', 'attention_norm', 'ffn_norm',
      'query_norm', 'key_norm', 'router', 'balance',
  }  # fmt: skip
  assert other - {'balance'} == {
      'query', 'key_value', 'output', 'expert_in', 'expert_out', 'dense_in',
      'dense_out',
  }  # fmt: skip


def test_adam_by_hand():
  """The first step of Adam is -rate x sign(g); decay is decoupled."""
  w = {'embedding': jnp.array([1.0, -2.0])}
  g = {'embedding': jnp.array([0.3, -1e-3])}
  (change,) = updates(make('adam', weight_decay=0.5), w, g)
  np.testing.assert_allclose(
      change['embedding'], [-0.1 - 0.05, 0.1 + 0.1], rtol=1e-4
  )


@pytest.mark.parametrize('name', ['adam', 'muon'])
def test_balance_is_left_alone(weights, grads, name):
  rule = make(name, weight_decay=0.5)
  for change in updates(rule, weights, grads, grads):
    for path, leaf in jax.tree.leaves_with_path(change):
      moved = bool(jnp.abs(leaf).max() > 0)
      assert moved != model.is_balance(path), path


def test_the_gradient_is_clipped_by_its_global_norm():
  w = {'embedding': jnp.zeros(2), 'head': jnp.zeros(2)}
  g = {'embedding': jnp.array([3.0, 0.0]), 'head': jnp.array([0.0, 4.0])}
  rule = make('adam', clip_norm=1.0)
  free = make('adam')
  scaled = jax.tree.map(lambda a: a / 5, g)
  one, two = updates(rule, w, g, scaled)
  also, again = updates(free, w, scaled, scaled)
  for a, b in ((one, also), (two, again)):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)


@pytest.mark.parametrize(
    'decay, warmup, expected',
    [
        ('constant', 0, [2, 2, 2, 2, 2]),
        ('linear', 0, [2, 1.5, 1, 0.5, 0]),
        ('cosine', 0, [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
        ('constant', 4, [0, 1, 2, 2, 2]),
        ('linear', 4, [0, 1, 2, 1, 0]),
        ('cosine', 4, [0, 1, 2, 1, 0]),
    ],
)
def test_schedules_by_hand(decay, warmup, expected):
  rate = optimizer_lib.schedule(2.0, 8, warmup, decay)
  np.testing.assert_allclose(
      [float(rate(n)) for n in range(0, 9, 2)], expected, atol=1e-6
  )
  assert float(rate(100)) == pytest.approx(expected[-1], abs=1e-6)


def test_warmup_as_long_as_the_run():
  rate = optimizer_lib.schedule(1.0, 4, 4, 'linear')
  assert [float(rate(n)) for n in range(5)] == [0, 0.25, 0.5, 0.75, 1.0]


def test_unknown_names():
  with pytest.raises(ValueError, match="'sgd': allowed are 'adam' and 'muon'"):
    make('sgd')
  with pytest.raises(ValueError, match="decay='step': allowed are"):
    make('adam', decay='step')


@pytest.mark.parametrize(
    'field, value',
    [
        ('learning_rate', -1.0),
        ('learning_rate', float('nan')),
        ('warmup', -1),
        ('clip_norm', 0.0),
        ('weight_decay', -0.1),
        ('b2', 1.0),
    ],
)
def test_numbers_out_of_range(field, value):
  options = {'learning_rate': 1e-3, 'steps': 3} | {field: value}
  with pytest.raises(ValueError, match=f"{field}={value} of optimizer 'adam'"):
    optimizer_lib.make('adam', **options)


def test_steps_below_a_rounded_weight_add_up():
  # Adam moves by the rate when gradients do not change. Below 1 bfloat16 has
  # steps of 1/256: a step of .0005 is rounded away unless it is kept.
  numerics = nx.Numerics('bfloat16')
  gone = make('adam', learning_rate=5e-4)
  kept = make('adam', learning_rate=5e-4, cast=numerics.cast)
  weights = {'query': jnp.ones((2, 2)), 'balance': jnp.zeros(2)}
  grads = {'query': jnp.ones((2, 2)), 'balance': jnp.zeros(2)}
  seen = {}
  for name, rule in (('gone', gone), ('kept', kept)):

    def step(w, state, rule=rule):
      change, state = rule.update(grads, state, w)
      w = optax.apply_updates(w, change)
      # As a router's bias moves, which the rule must not undo.
      w = {'query': numerics.cast(w['query']), 'balance': w['balance'] + 1.0}
      return w, state

    step = jax.jit(step, donate_argnums=(0, 1))
    w, state = jax.tree.map(jnp.copy, weights), jax.jit(rule.init)(weights)
    seen[name] = []
    for _ in range(8):
      w, state = step(w, state)
      seen[name].append(float(w['query'][1, 1]))
    np.testing.assert_array_equal(w['balance'], 8.0)
  assert seen['gone'] == [1.0] * 8
  # 1 - .0005 n to the nearest 1/256: .002 and more are past the half step.
  assert seen['kept'] == [1.0] * 3 + [1 - 1 / 256] * 5
