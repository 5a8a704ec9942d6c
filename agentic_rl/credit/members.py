"""Who counts in a group: the rules that every estimator shares.

A *member* is a trajectory that infrastructure did not break and that holds at
least one action. Everything else stays out of every mean and deviation, gets
no advantage, and is only counted; so a broken sandbox or a rollout without an
action never moves the baseline of the others.

Whether a group says anything is judged by exact equality of the outcomes
(`Trajectory.reward`), never by a deviation against a threshold, and never by
totals: rewards inserted on the way would make a group in which everybody
failed look informative.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from agentic_rl import types


def members(group: types.Group) -> list[int]:
  """Returns the indices of the trajectories that count."""
  return [
      i
      for i, trajectory in enumerate(group.trajectories)
      if not trajectory.failed and trajectory.turns
  ]


def is_uniform(group: types.Group, keep: Sequence[int]) -> bool:
  """Returns True when all outcomes of the members `keep` are exactly equal."""
  return len({float(group.trajectories[i].reward) for i in keep}) < 2


def no_credit(group: types.Group) -> list[np.ndarray]:
  """Returns zeros, float32 [A_i] for each trajectory i of the group."""
  return [np.zeros(len(t.turns), np.float32) for t in group.trajectories]


def returns(group: types.Group, keep: Sequence[int]) -> np.ndarray:
  """Returns the total reward of each member, float64 [len(keep)]."""
  return np.array(
      [group.trajectories[i].total_reward for i in keep], np.float64
  )
