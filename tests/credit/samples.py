"""Trajectories and groups with nothing in them but what credit reads."""

import numpy as np

from agentic_rl import types


def trajectory(
    states, reward, *, rewards=None, status=types.Status.SUBMITTED, info=None
):
  rewards = rewards or [0.0] * len(states)
  turns = tuple(
      types.Turn(types.Action('', 'view', True, 0, 0), state, r, '', 0, 0)
      for state, r in zip(states, rewards)
  )
  return types.Trajectory(
      rollout_id=0,
      task_id='t',
      seed=0,
      tokens=np.zeros(0, np.int32),
      sampled=np.zeros(0, bool),
      logp_behavior=np.zeros(0, np.float32),
      routes=None,
      weight_version=0,
      turns=turns,
      status=status,
      reward=reward,
      info=info or {},
  )


def broken(states=('s0',), reward=0.0):
  return trajectory(states, reward, status=types.Status.ENV_FAILURE)


def group(*trajectories):
  return types.Group(types.Task('t', 'e', '', {}), tuple(trajectories))


def random_group(rng, size=6, states=4):
  """A group with loops, shared states and inserted rewards, not uniform."""
  out = []
  for i in range(size):
    turns = int(rng.integers(1, 6))
    path = ['s0'] + [f's{rng.integers(states)}' for _ in range(turns - 1)]
    rewards = [float(r) for r in rng.choice([0.0, -0.1], turns)]
    out.append(trajectory(path, float(i % 2), rewards=rewards))
  return group(*out)
