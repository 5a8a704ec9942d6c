"""GRPO: one advantage for a whole trajectory. The control arm.

Stands between collection and packing: group -> advantages per action. Every
action of trajectory i gets the same advantage, so it can not tell the action
that decided from those that had no effect; `action_td` can.

Differences from the paper: the outcome *and* the rewards inserted on the way
are summed into R_i; groups whose outcomes are all equal are left out
(`keep_uniform`); `eps` keeps rounding noise of equal sums from being blown up.
"""

from __future__ import annotations

import numpy as np

from agentic_rl import types
from agentic_rl.credit import members as members_lib


def grpo(
    group: types.Group,
    *,
    normalize_std: bool = True,
    keep_uniform: bool = False,
    eps: float = 1e-6,
) -> list[np.ndarray]:
  """Compares each trajectory with the mean of its group.

    A_{i,t} = (R_i − mean(R)) / (std(R) + eps)

  Source: arXiv:2402.03300 section 4.1.2 (outcome supervision). Without the
  deviation it is Dr. GRPO, arXiv:2503.20783 section 3.2: dividing by std(R)
  gives more weight to tasks that are nearly always or nearly never solved.

  Args:
    group: rollouts of one task.
    normalize_std: divide by the (population) deviation of the returns.
    keep_uniform: also credit groups whose outcomes are all equal; then only
      rewards inserted on the way tell their members apart.
    eps: added to the deviation, > 0.

  Returns:
    One float32 array [A_i] per trajectory; zeros where it is not a member.

  Raises:
    ValueError: `eps` is not positive.
  """
  if not eps > 0:
    raise ValueError(f'grpo: eps must be positive, not {eps}')
  advantages = members_lib.no_credit(group)
  keep = members_lib.members(group)
  if not keep_uniform and members_lib.is_uniform(group, keep):
    return advantages
  returns_G = members_lib.returns(group, keep)
  if not keep or np.all(returns_G == returns_G[0]):
    return advantages  # exact: a rounded mean would leave dust
  centered_G = returns_G - returns_G.mean()
  if normalize_std:
    centered_G = centered_G / (returns_G.std() + eps)
  for i, advantage in zip(keep, centered_G):
    advantages[i][:] = advantage
  return advantages
