import numpy as np
import pytest

from agentic_rl.credit import action_td as action_td_lib
from tests.credit import samples

action_td = action_td_lib.action_td


def four():
  return samples.group(
      samples.trajectory(['s0', 's1'], 1.0),
      samples.trajectory(['s0', 's2'], 0.0),
      samples.trajectory(['s0', 's1'], 0.0),
      samples.trajectory(['s0', 's1', 's1'], 1.0),
  )


def check(got, want):
  for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7)
    assert g.dtype == np.float32


def test_by_hand_first_visits():
  # V(s0) = 2/4, V(s1) = (1 + 0 + 1)/3 = 2/3, V(s2) = 0.
  check(
      action_td(four(), lam=0.0),
      ([1 / 6, 1 / 3], [-1 / 2, 0], [1 / 6, -2 / 3], [1 / 6, 0, 1 / 3]),
  )
  check(
      action_td(four(), lam=0.2),
      (
          [1 / 6 + 0.2 / 3, 1 / 3],
          [-1 / 2, 0],
          [1 / 6 - 0.4 / 3, -2 / 3],
          [1 / 6 + 0.04 / 3, 0.2 / 3, 1 / 3],
      ),
  )
  # lam = 1: G_t - V(s_t).
  check(
      action_td(four(), lam=1.0),
      ([1 / 2, 1 / 3], [-1 / 2, 0], [-1 / 2, -2 / 3], [1 / 2, 1 / 3, 1 / 3]),
  )


def test_by_hand_every_visit():
  # V(s1) = (1 + 0 + 1 + 1)/4 = 3/4.
  check(
      action_td(four(), lam=0.0, visits='every'),
      ([1 / 4, 1 / 4], [-1 / 2, 0], [1 / 4, -3 / 4], [1 / 4, 0, 1 / 4]),
  )


def test_by_hand_leave_one_out():
  # Baselines without the own visits: V(s0) is 1/3 for winners, 2/3 for
  # losers; V(s1) is 1/2, 1, 1/2; nobody else saw s2. Targets keep V.
  check(
      action_td(four(), lam=0.0, leave_one_out=True),
      ([1 / 3, 1 / 2], [-2 / 3, 0], [0, -1], [1 / 3, 1 / 6, 1 / 2]),
  )


def test_by_hand_inserted_rewards():
  # G of the first: 0.8 at s0 (-0.2 then 1), 1 at s1. The second: 0, 0.
  group = samples.group(
      samples.trajectory(['s0', 's1'], 1.0, rewards=[-0.2, 0.0]),
      samples.trajectory(['s0', 's1'], 0.0),
  )
  # V(s0) = 0.4, V(s1) = 0.5; the penalty falls on the action that earned it.
  check(
      action_td(group, lam=0.0),
      ([-0.2 + 0.5 - 0.4, 1 - 0.5], [0.5 - 0.4, -0.5]),
  )


def test_scale_and_deviation():
  plain = action_td(four())
  halved = action_td(four(), scale=2.0)
  # Returns 1, 0, 0, 1 have a deviation of 1/2.
  doubled = action_td(four(), normalize_std=True)
  for a, b, c in zip(plain, halved, doubled):
    np.testing.assert_allclose(a, 2 * b, rtol=1e-6)
    np.testing.assert_allclose(a, c / 2, rtol=1e-6)


@pytest.mark.parametrize('visits', action_td_lib.VISITS)
@pytest.mark.parametrize('seed', range(4))
def test_equals_the_sum_of_deltas(seed, visits):
  """GAE by its definition, with the table filled by plain loops."""
  group, lam = samples.random_group(np.random.default_rng(seed)), 0.3
  table = {}
  togo = []
  for t in group.trajectories:
    rewards = [turn.reward for turn in t.turns]
    rewards[-1] += t.reward
    togo.append([sum(rewards[k:]) for k in range(len(rewards))])
    seen = set()
    for turn, value in zip(t.turns, togo[-1]):
      if visits == 'every' or turn.state not in seen:
        table.setdefault(turn.state, []).append(value)
      seen.add(turn.state)
  values = {state: sum(v) / len(v) for state, v in table.items()}
  for t, got in zip(
      group.trajectories, action_td(group, lam=lam, visits=visits)
  ):
    v = [values[turn.state] for turn in t.turns] + [0.0]
    r = [turn.reward for turn in t.turns]
    r[-1] += t.reward
    deltas = [r[k] + v[k + 1] - v[k] for k in range(len(r))]
    want = [
        sum(lam ** (j - k) * deltas[j] for j in range(k, len(r)))
        for k in range(len(r))
    ]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('seed', range(4))
def test_order_of_members_does_not_matter(seed):
  rng = np.random.default_rng(seed)
  group = samples.random_group(rng)
  order = rng.permutation(len(group.trajectories))
  shuffled = samples.group(*[group.trajectories[i] for i in order])
  plain = action_td(group)
  for i, got in zip(order, action_td(shuffled)):
    np.testing.assert_allclose(got, plain[i], atol=1e-6)


def test_monte_carlo_credit_sums_to_zero_in_each_state():
  group = samples.random_group(np.random.default_rng(7))
  sums = {}
  advantages = action_td(group, lam=1.0, visits='every')
  for t, values in zip(group.trajectories, advantages):
    for turn, value in zip(t.turns, values):
      sums[turn.state] = sums.get(turn.state, 0.0) + float(value)
  np.testing.assert_allclose(list(sums.values()), 0.0, atol=1e-5)


def test_excluded_members_do_not_move_the_others():
  rng = np.random.default_rng(3)
  group = samples.random_group(rng)
  extra = (samples.broken(['s0', 's1'], 1.0), samples.trajectory([], 1.0))
  mixed = action_td(samples.group(*extra, *group.trajectories))
  for got, want in zip(mixed[2:], action_td(group)):
    np.testing.assert_array_equal(got, want)
  assert mixed[0].tolist() == [0.0, 0.0] and mixed[1].shape == (0,)


def test_uniform_outcomes_give_nothing():
  group = samples.group(
      samples.trajectory(['s0', 's1'], 0.0, rewards=[0.5, 0.0]),
      samples.trajectory(['s0', 's2'], 0.0),
  )
  assert not any(a.any() for a in action_td(group))
  assert any(a.any() for a in action_td(group, keep_uniform=True))


def test_no_comparison_leaves_the_credit_with_the_split():
  group = samples.group(
      samples.trajectory(['s0', 'a1', 'a2'], 1.0),
      samples.trajectory(['s0', 'b1', 'b2'], 0.0),
  )
  check(action_td(group), ([0.5, 0, 0], [-0.5, 0, 0]))


@pytest.mark.parametrize('p', [0.5, 0.3])
def test_known_truth_of_one_decision(p):
  """Only turn 1 of 4 matters: +0.6 (1 - p) if right, -0.6 p if wrong."""
  rng = np.random.default_rng(0)
  trajectories, choices = [], []
  for _ in range(2000):
    right = bool(rng.random() < p)
    reward = float(right != (rng.random() < 0.2))
    after = f'r{right}'
    path = ['start', 'seen', after + '2', after + '3']
    trajectories.append(samples.trajectory(path, reward))
    choices.append(right)
  advantages = np.stack(action_td(samples.group(*trajectories)))
  right = np.array(choices)
  mean_A = advantages.mean(0)
  np.testing.assert_allclose(mean_A, 0.0, atol=0.02)
  assert abs(advantages[right, 1].mean() - 0.6 * (1 - p)) < 0.03
  assert abs(advantages[~right, 1].mean() + 0.6 * p) < 0.03


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(lam=1.5), 'lam must be in'),
        (dict(lam=float('nan')), 'lam must be in'),
        (dict(visits='last'), 'visits must be one of'),
        (dict(scale=0.0), 'scale must be positive'),
    ],
)
def test_bad_options(options, message):
  with pytest.raises(ValueError, match=message):
    action_td(samples.group(), **options)
