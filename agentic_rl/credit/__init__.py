"""Credit: from groups of trajectories to one advantage for each action.

Pure functions over NumPy arrays, between collection and packing:

    estimator(group, **options) -> [float32 [A_i] for each trajectory i]

New estimator: copy `forkme.py`, add a line to `ESTIMATORS`, add a test with
values computed by hand.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from agentic_rl import types
from agentic_rl.credit import action_td
from agentic_rl.credit import grpo
from agentic_rl.credit import members as members_lib

Estimator = Callable[..., list[np.ndarray]]

ESTIMATORS: Mapping[str, Estimator] = {
    'action_td': action_td.action_td,
    'grpo': grpo.grpo,
}

_EMPTY_GROUP = types.Group(types.Task('', '', '', {}), ())


def make(name: str, **options: Any) -> Callable[[types.Group], list]:
  """Returns the estimator `name` with its options set and checked.

  Call it before the run starts: a wrong option fails here, not after the
  first rollouts.

  Args:
    name: key of `ESTIMATORS`.
    **options: keyword arguments of that estimator.

  Returns:
    A function from a group to its advantages.

  Raises:
    ValueError: unknown name or option (with the near ones), or a bad value.
  """
  if name not in ESTIMATORS:
    raise ValueError(_unknown('credit estimator', name, ESTIMATORS))
  parameters = inspect.signature(ESTIMATORS[name]).parameters.values()
  known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  for option in options:
    if option not in known:
      raise ValueError(_unknown(f'option of credit.{name}', option, known))
  estimator = functools.partial(ESTIMATORS[name], **options)
  estimator(_EMPTY_GROUP)  # checks the values of the options
  return estimator


def assign(
    groups: Sequence[types.Group], name: str, **options: Any
) -> tuple[list[list[np.ndarray]], dict[str, float]]:
  """Assigns an advantage to every action of every trajectory.

  Args:
    groups: P groups.
    name: key of `ESTIMATORS`.
    **options: keyword arguments of that estimator.

  Returns:
    advantages: for each group, one float32 array [A_i] per trajectory.
    stats: see `group_stats`.

  Raises:
    ValueError: unknown name or option, a bad value, or an estimator that
      returned other shapes or numbers that are not finite.
  """
  estimator = make(name, **options)
  advantages = [estimator(group) for group in groups]
  for group, arrays in zip(groups, advantages):
    _check_advantages(name, group, arrays)
  return advantages, group_stats(groups, advantages)


def group_stats(
    groups: Sequence[types.Group], advantages: Sequence[Sequence[np.ndarray]]
) -> dict[str, float]:
  """Describes how much signal a batch of groups holds.

  Shares are over groups with at least one member (a trajectory that was not
  broken by infrastructure and has an action).

  Args:
    groups: P groups.
    advantages: what an estimator returned for each.

  Returns:
    zero_reward_share: groups in which no member has an outcome above zero.
    all_solved_share: groups in which every member solved its task
      (`info['solved']`, else an outcome of at least 1).
    uniform_share: groups whose outcomes are all equal; includes most of both.
    failed_count: trajectories broken by infrastructure.
    no_action_count: other trajectories without an action.
    empty_count: groups without a member.
    advantage_mean, advantage_std: over all actions of all members.
  """
  zero = solved = uniform = empty = failed = no_action = 0
  values = [np.zeros(0, np.float32)]
  for group, arrays in zip(groups, advantages):
    keep = members_lib.members(group)
    failures = sum(t.failed for t in group.trajectories)
    failed += failures
    no_action += len(group.trajectories) - failures - len(keep)
    if not keep:
      empty += 1
      continue
    kept = [group.trajectories[i] for i in keep]
    zero += all(t.reward <= 0 for t in kept)
    solved += all(t.info.get('solved', t.reward >= 1) for t in kept)
    uniform += members_lib.is_uniform(group, keep)
    values.extend(arrays[i] for i in keep)
  flat = np.concatenate(values).astype(np.float64)
  count = max(len(groups) - empty, 1)
  return {
      'zero_reward_share': zero / count,
      'all_solved_share': solved / count,
      'uniform_share': uniform / count,
      'failed_count': float(failed),
      'no_action_count': float(no_action),
      'empty_count': float(empty),
      'advantage_mean': float(flat.mean()) if flat.size else 0.0,
      'advantage_std': float(flat.std()) if flat.size else 0.0,
  }


def _check_advantages(name: str, group: types.Group, arrays) -> None:
  """Holds an estimator to its contract, whoever wrote it."""
  if len(arrays) != len(group.trajectories):
    raise ValueError(
        f'credit.{name} returned {len(arrays)} arrays for'
        f' {len(group.trajectories)} trajectories'
    )
  for trajectory, array in zip(group.trajectories, arrays):
    actions = len(trajectory.turns)
    if array.shape != (actions,) or array.dtype != np.float32:
      raise ValueError(
          f'credit.{name} returned {array.dtype}{list(array.shape)} for a'
          f' trajectory with {actions} actions; want float32[{actions}]'
      )
    if not np.all(np.isfinite(array)):
      raise ValueError(
          f'credit.{name} is not finite for rollout {trajectory.rollout_id}'
          f' (reward {trajectory.reward})'
      )


def _unknown(kind: str, name: str, known) -> str:
  near = difflib.get_close_matches(name, known, n=3)
  hint = f' (near: {", ".join(near)})' if near else ''
  return f'unknown {kind} {name!r}{hint}; known: {", ".join(sorted(known))}'
