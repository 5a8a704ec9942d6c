"""The smallest complete estimator, made to be copied.

To add yours: copy this file and its test, replace the middle, add one line to
`ESTIMATORS` in `credit/__init__.py`, and give your config its options
(`config.credit.mine = dict(weight=1.0)`). Options are keyword-only, have
defaults, and are checked before anything else, so that a wrong one stops the
run before it starts.
"""

from __future__ import annotations

import numpy as np

from agentic_rl import types
from agentic_rl.credit import members as members_lib


def forkme(group: types.Group, *, weight: float = 1.0) -> list[np.ndarray]:
  """Credits every action with what its trajectory earned above the mean.

    A_{i,t} = weight · (R_i − mean(R))

  Args:
    group: rollouts of one task.
    weight: scale of the advantages, > 0.

  Returns:
    One float32 array [A_i] per trajectory; zeros where it is not a member.

  Raises:
    ValueError: `weight` is not positive.
  """
  if not weight > 0:
    raise ValueError(f'forkme: weight must be positive, not {weight}')
  advantages = members_lib.no_credit(group)
  keep = members_lib.members(group)
  if members_lib.is_uniform(group, keep):
    return advantages
  returns_G = members_lib.returns(group, keep)
  for i, earned in zip(keep, returns_G - returns_G.mean()):
    advantages[i][:] = weight * earned
  return advantages
