import math

import numpy as np
import pytest

from agentic_rl.credit import grpo as grpo_lib
from tests.credit import samples

grpo = grpo_lib.grpo


def test_by_hand():
  # Returns 1, 0, 0, 1 + (-0.2): mean 0.45, variance
  # (0.3025 + 0.2025 + 0.2025 + 0.1225) / 4 = 0.2075.
  group = samples.group(
      samples.trajectory(['a', 'b'], 1.0),
      samples.trajectory(['a'], 0.0),
      samples.trajectory(['a', 'c', 'd'], 0.0),
      samples.trajectory(['a', 'b'], 1.0, rewards=[-0.2, 0.0]),
  )
  plain = grpo(group, normalize_std=False)
  for got, want in zip(plain, ([0.55] * 2, [-0.45], [-0.45] * 3, [0.35] * 2)):
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got.dtype == np.float32
  scaled = grpo(group, eps=1e-12)
  np.testing.assert_allclose(scaled[0], [0.55 / math.sqrt(0.2075)] * 2)


@pytest.mark.parametrize('seed', range(5))
def test_sums_to_zero_over_trajectories_without_deviation(seed):
  group = samples.random_group(np.random.default_rng(seed))
  advantages = grpo(group, normalize_std=False)
  assert abs(sum(float(a[0]) for a in advantages)) < 1e-6


def test_failed_and_actionless_members_do_not_move_the_baseline():
  kept = [
      samples.trajectory(['a'], 1.0),
      samples.trajectory(['a', 'b'], 0.0),
      samples.trajectory(['a'], 0.0),
  ]
  alone = grpo(samples.group(*kept))
  mixed = grpo(
      samples.group(
          samples.broken(['a', 'b'], reward=0.0),
          kept[0],
          samples.trajectory([], 0.0),
          *kept[1:],
          samples.broken([], reward=5.0),
      )
  )
  for got, want in zip([mixed[1], mixed[3], mixed[4]], alone):
    np.testing.assert_array_equal(got, want)
  np.testing.assert_array_equal(mixed[0], [0.0, 0.0])
  assert mixed[2].shape == (0,) and mixed[5].shape == (0,)


def test_uniform_outcomes_give_nothing_even_when_shaped_totals_differ():
  group = samples.group(
      samples.trajectory(['a', 'b'], 0.0, rewards=[-0.1, 0.0]),
      samples.trajectory(['a', 'b'], 0.0, rewards=[0.0, 0.3]),
  )
  assert not any(a.any() for a in grpo(group))
  kept = grpo(group, keep_uniform=True, normalize_std=False)
  np.testing.assert_allclose(kept[0], [-0.2, -0.2], rtol=1e-6)


def test_equal_returns_leave_no_dust():
  # The float64 mean of three 0.1 is not 0.1.
  group = samples.group(*[samples.trajectory(['a'], 0.1)] * 3)
  assert not any(a.any() for a in grpo(group, keep_uniform=True, eps=1e-30))


def test_empty_group_and_bad_eps():
  assert grpo(samples.group()) == []
  assert grpo(samples.group(samples.broken()))[0].tolist() == [0.0]
  with pytest.raises(ValueError, match='eps must be positive'):
    grpo(samples.group(), eps=0.0)


@pytest.mark.parametrize('seed', range(3))
def test_order_of_members_does_not_matter(seed):
  rng = np.random.default_rng(seed)
  group = samples.random_group(rng)
  order = rng.permutation(len(group.trajectories))
  shuffled = samples.group(*[group.trajectories[i] for i in order])
  plain = grpo(group)
  for i, got in zip(order, grpo(shuffled)):
    np.testing.assert_allclose(got, plain[i], atol=1e-6)
