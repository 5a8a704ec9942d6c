import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.learner import losses


def test_supervised_by_hand():
  loss, clipped = losses.supervised(jnp.array([-1.5, 0.0]), None, None)
  assert loss.tolist() == [1.5, 0.0]
  assert clipped.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    'ratio, advantage, loss, clipped',
    [
        (1.0, 2.0, -2.0, 0),
        (1.2, 2.0, -2.4, 0),
        (1.5, 2.0, -2.56, 1),  # 1.28 x 2
        (0.5, 2.0, -1.0, 0),  # the lower bound holds for A < 0 only
        (0.9, -1.0, 0.9, 0),
        (0.5, -1.0, 0.8, 1),
        (3.0, -1.0, 3.0, 0),  # nor the upper one for A < 0
        (1.5, 0.0, 0.0, 0),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, loss, clipped):
  one = lambda x: jnp.array([x], jnp.float32)
  new, old = one(np.log(ratio) - 3), one(-3.0)
  got, share = losses.ppo_clip(new, old, one(advantage))
  np.testing.assert_allclose(got[0], loss, rtol=1e-6)
  assert share[0] == clipped
  slope = jax.grad(lambda x: losses.ppo_clip(x, old, one(advantage))[0].sum())
  # d(-ρ A)/d log π = -ρ A on the free branch, 0 on the clipped one.
  expected = 0 if clipped else -ratio * advantage
  np.testing.assert_allclose(slope(new)[0], expected, rtol=1e-6, atol=1e-7)


def test_bounds_are_options():
  new, zero, one = jnp.log(jnp.array([1.15])), jnp.zeros(1), jnp.ones(1)
  for high, loss in ((1.28, -1.15), (1.1, -1.1)):
    got, _ = losses.ppo_clip(new, zero, one, clip_high=high)
    np.testing.assert_allclose(got[0], loss, rtol=1e-6)
  low, _ = losses.ppo_clip(-new, zero, -one, clip_low=0.95)
  np.testing.assert_allclose(low[0], 0.95, rtol=1e-6)


def test_on_policy_the_ratio_is_exactly_one():
  rng = np.random.default_rng(0)
  logp = jnp.asarray(-np.exp(rng.normal(size=999) * 4), jnp.float32)
  advantages = jnp.asarray(rng.normal(size=999), jnp.float32)
  loss, clipped = losses.ppo_clip(logp, logp, advantages)
  np.testing.assert_array_equal(loss, -advantages)
  assert not clipped.any()


def test_table():
  assert losses.LOSSES['ppo_clip'] is losses.ppo_clip
  assert losses.LOSSES['supervised'] is losses.supervised
