"""A stale policy draws, another learns: the bias, and what each correction cuts.

Every sequence of a tiny policy is enumerated, so the true policy gradient, the
mean of each estimator and its variance are exact; seeded samples only confirm
them. The estimators are the learner's own loss and its gradient.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.learner import corrections
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from kernels_pallas import numerics as nx
from tests.rollout import samples

VOCAB, LENGTH = 3, 4
COUNT = VOCAB**LENGTH
# All sequences [81, 4], and the number of the prefix before each token.
TOKENS = np.stack(
    np.unravel_index(np.arange(COUNT), (VOCAB,) * LENGTH), -1
).astype(np.int32)
FIRST = [(VOCAB**t - 1) // (VOCAB - 1) for t in range(LENGTH + 1)]
PREFIX = np.stack(
    [
        FIRST[t] + np.arange(COUNT) // VOCAB ** (LENGTH - t)
        for t in range(LENGTH)
    ],
    -1,
)
REWARD = np.random.default_rng(5).normal(size=COUNT) + 1.0


def token_logps(theta):
  """log π(y_t | y_<t) [81, 4] of a table of logits [prefixes, V]."""
  z = jax.nn.log_softmax(theta, -1)
  return z[PREFIX, TOKENS]


def update_of(theta, theta_behavior, weights, **loss):
  """The learner's loss over all sequences, weighted, and its gradient."""
  config = update.LossConfig(**loss)
  recorded = token_logps(theta_behavior).reshape(-1)
  rows = COUNT * LENGTH
  flat = lambda a: jnp.repeat(jnp.asarray(a, jnp.float32), LENGTH)

  def value(theta):
    per_token, _, _ = update.token_loss(
        config,
        token_logps(theta).reshape(-1),
        recorded,
        flat(REWARD),
        flat(weights),
        jnp.ones(rows, bool),
        functools.partial(
            corrections.sequence_sums,
            sequence_R=jnp.repeat(jnp.arange(COUNT), LENGTH),
        ),
    )
    return (flat(weights) * per_token).sum()

  return jax.grad(value)(theta)


@functools.partial(jax.jit, static_argnums=(2, 3))
def each(theta, theta_behavior, name, options):
  """The estimate [81, prefixes, V] that each sequence alone would give."""
  one = functools.partial(
      update_of,
      theta,
      theta_behavior,
      anchor='learner',
      correction=name,
      correction_options=options,
  )
  return jax.lax.map(one, jnp.eye(COUNT))


def make_policies():
  """A policy, and what it was some updates before: noisy steps away."""
  rng = np.random.default_rng(0)
  theta = rng.normal(size=(FIRST[LENGTH], VOCAB))
  return jnp.asarray(theta, jnp.float32), jnp.asarray(
      theta - 0.6 * rng.normal(size=theta.shape), jnp.float32
  )


def of(name, **options):
  """The exact bias, variance and effective share of an estimator."""
  theta, stale = make_policies()
  p = lambda t: np.exp(np.asarray(token_logps(t), np.float64).sum(-1))
  table = lambda g: np.asarray(g, np.float64).reshape(COUNT, -1)
  options = tuple(sorted(options.items()))
  truth = p(theta) @ table(each(theta, theta, 'none', ()))
  own = table(each(theta, stale, name, options))
  mean = p(stale) @ own
  variance = p(stale) @ ((own - mean) ** 2).sum(-1)
  bias = np.linalg.norm(mean - truth) / np.linalg.norm(truth)
  return bias, variance / np.linalg.norm(truth) ** 2, (truth, own, p(stale))


@pytest.fixture(scope='module')
def table():
  """Prints and returns bias and variance of the estimators."""
  arms = {
      'none': ('none', {}),
      'token 1e6': ('tis_token', dict(cap=1e6)),
      'token 2': ('tis_token', dict(cap=2.0)),
      **{
          f'sequence {cap:g}': ('tis_sequence', dict(cap=cap))
          for cap in (1e6, 8.0, 4.0, 2.0, 1.0)
      },
      'mask token': ('mask_token', {}),
      'mask sequence': ('mask_sequence', dict(low=0.25, high=4.0)),
      'mask geometric': ('mask_geometric', dict(low=0.5, high=2.0)),
  }
  out = {}
  for arm, (name, options) in arms.items():
    out[arm] = of(name, **options)
    print(f'{arm:15} bias {out[arm][0]:8.5f} variance {out[arm][1]:8.2f}')
  return out


def test_the_true_gradient_is_that_of_the_expected_reward(table):
  """Plain differentiation of Σ_y π(y) R(y), no learner in it."""
  theta, _ = make_policies()
  value = lambda t: (jnp.exp(token_logps(t).sum(-1)) * REWARD).sum()
  expected = -np.asarray(jax.grad(value)(theta)).reshape(-1)
  truth = table['none'][2][0]
  np.testing.assert_allclose(truth, expected, atol=2e-6)
  assert np.linalg.norm(truth) > 0.1


def test_corrections_cut_the_bias_they_claim_to_cut(table):
  bias = {arm: row[0] for arm, row in table.items()}
  assert bias['none'] > 1
  assert bias['sequence 1e+06'] < 1e-4  # unbiased without a cap that binds
  # Tokens alone: the prefix is still that of the stale policy.
  assert 0.2 < bias['token 1e6'] < 0.4 * bias['none']
  assert bias['token 2'] < 0.4 * bias['none']
  assert bias['mask token'] < 0.4 * bias['none']
  assert bias['mask sequence'] < 0.3 * bias['none']
  # No importance weight, and it shows.
  assert 0.6 < bias['mask geometric'] < 0.9 * bias['none']


def test_truncation_trades_variance_for_bias(table):
  arms = [table[f'sequence {cap:g}'] for cap in (1e6, 8.0, 4.0, 2.0, 1.0)]
  biases, variances = [a[0] for a in arms], [a[1] for a in arms]
  assert biases == sorted(biases) and biases[-1] > 0.4
  assert variances == sorted(variances, reverse=True)
  assert variances[0] > 3 * variances[-1]
  # What the product costs beside single tokens.
  assert variances[0] > 1.4 * table['token 1e6'][1]


def test_samples_agree_with_the_enumeration(table):
  """Eight seeds: 95 % intervals of the bias, along its own direction."""
  draws = 20_000
  for arm in ('none', 'token 1e6', 'sequence 1e+06', 'sequence 2'):
    bias, _, (truth, own, p) = table[arm]
    gap = p @ own - truth
    if bias < 1e-4:  # no direction of its own: that of the uncorrected one
      _, _, (_, plain, _) = table['none']
      gap = p @ plain - truth
    direction = gap / np.linalg.norm(gap) / np.linalg.norm(truth)
    estimates = []
    for seed in range(8):
      rng = np.random.default_rng(seed)
      drawn = rng.choice(COUNT, draws, p=p / p.sum())
      estimates.append((own[drawn].mean(0) - truth) @ direction)
    mean = np.mean(estimates)
    half = 2.365 * np.std(estimates, ddof=1) / np.sqrt(8)  # t, 7 degrees
    print(f'{arm:15} bias {mean:8.4f} ± {half:.4f}, exact {bias:.4f}')
    assert abs(mean - bias) < 2.5 * half + 1e-3
    if arm == 'sequence 1e+06':
      assert abs(mean) < 2.5 * half + 1e-3
    else:
      assert mean - half > 0.2  # a bias that the samples can see


# The same with a real policy, packed rows and the learner's gradient program.

CFG = samples.config(
    vocab=8, width=16, layers=1, pattern='w', heads=1, experts=2,
    topk_experts=1, expert_width=8,
)  # fmt: skip
PAIRS = np.stack(np.unravel_index(np.arange(64), (8, 8)), -1)


@pytest.mark.slow
def test_a_stale_sampler_and_the_learner():
  """Prompt 5, then two tokens: 64 sequences, eight to a row."""
  policy = samples.weights(CFG)
  stale = jax.tree.map(
      lambda a, b: 0.7 * a + 0.3 * b, policy, samples.weights(CFG, 1)
  )
  rewards = np.random.default_rng(2).normal(size=64) + 0.5

  def pack(logp, weights):
    examples = []
    for pair, logps, weight, reward in zip(PAIRS, logp, weights, rewards):
      drawn = np.asarray([False, True, True])
      spread = lambda v, drawn=drawn: np.where(drawn, v, 0).astype(np.float32)
      examples.append(
          pack_lib.Example(
              tokens=np.asarray([5, *pair], np.int32),
              weights=spread(weight),
              advantages=spread(reward),
              logp_behavior=np.float32([0, *logps]),
              sampled=drawn,
          )
      )
    return pack_lib.pack(examples, row_tokens=64, page=8, rows=8)

  program = nx.jit(
      lambda w, b: update.policy_logprobs(w, b, CFG, 1.0)[0], exact=True
  )

  def logps(weights):
    batch = pack(np.zeros((64, 2)), np.ones(64))
    inputs = inputs_lib.flatten(batch)
    found = np.asarray(program(weights, inputs))[:128].reshape(64, 2)
    at = np.unravel_index(inputs['rows'][:128:2], batch.tokens_BT.shape)
    out = np.empty((64, 2), np.float32)
    out[batch.segments_BT[at]] = found  # rows hold them in some order
    return out

  def estimate(recorded, weights, **loss):
    one = update.Learner(
        CFG,
        update.LossConfig(anchor='learner', **loss),
        optimizer_lib.make('adam', learning_rate=1e-3, steps=9),
        rows=8,
        row_tokens=64,
    )
    sums = one._accumulate(
        policy, None, update.Sums.zeros(CFG, policy),
        inputs_lib.flatten(pack(recorded, weights)), np.float32(1),
    )  # fmt: skip
    flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(sums.grads)])
    return flat, corrections.metrics(
        {k: float(v) for k, v in sums.scalars.items()}
    )

  own, behavior = logps(policy), logps(stale)
  p, q = np.exp(own.sum(-1)), np.exp(behavior.sum(-1))
  np.testing.assert_allclose([p.sum(), q.sum()], 1, atol=1e-5)
  truth, _ = estimate(own, p)
  cap = (('cap', 1e6),)
  bias, seen = {}, {}
  for name in ('none', 'tis_token', 'tis_sequence'):
    options = cap if name != 'none' else ()
    found, seen[name] = estimate(
        behavior, q, correction=name, correction_options=options
    )
    bias[name] = np.linalg.norm(found - truth) / np.linalg.norm(truth)
  print({k: round(float(v), 6) for k, v in bias.items()}, seen)
  assert bias['none'] > 0.2
  assert bias['tis_sequence'] < 1e-3
  assert 0.02 < bias['tis_token'] < 0.8 * bias['none']
  assert seen['none'] == {} and seen['tis_token']['correction/ess'] < 0.99
