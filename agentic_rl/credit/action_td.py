"""Per-action temporal differences over the states that a group shares.

The default. Stands between collection and packing: group -> advantages per
action. Rollouts of one task pass through the same environment states (same
files, same things seen, same last test result: equal `Turn.state`), so the
group itself is a table of values, and an action is worth the step in value
that it made. An action after which nothing changed for better or worse gets
zero, whatever the outcome of its trajectory.

Sources: GAE, arXiv:1506.02438 eq. 16, with gamma = 1; states shared within a
group as in GiGPO, arXiv:2505.10978 section 3, which compares Monte-Carlo
returns (here lam = 1) where this bootstraps.

Choices:
  * First visits by default: V(s) has one vote for each trajectory, the return
    from its first visit. A rollout that runs in circles otherwise fills the
    table with its own outcome. (First visits are unbiased; every visit is
    biased with less variance at first: Singh and Sutton, 1996, "Reinforcement
    learning with replacing eligibility traces".)
  * V includes the trajectory's own return. As the value of the *next* state
    that is right: it is evidence of what the state is worth. As a baseline it
    shrinks an advantage, by (1 − 1/n) at n visitors when lam = 1, and never
    turns its sign; `leave_one_out` removes it from the baseline only.
  * A state that nobody else reached has no comparison: all its credit stays
    with the action that left the last shared state.
"""

from __future__ import annotations

import collections

import numpy as np

from agentic_rl import types
from agentic_rl.credit import members as members_lib

VISITS = ('first', 'every')


def action_td(
    group: types.Group,
    *,
    lam: float = 0.2,
    visits: str = 'first',
    leave_one_out: bool = False,
    normalize_std: bool = False,
    scale: float = 1.0,
    keep_uniform: bool = False,
) -> list[np.ndarray]:
  """Credits each action with the step in value that it made.

    V(s)  = mean of G_t over the group's visits to s,  V(terminal) = 0
    G_t   = r_t + … + r_{A−1} + R,  R the outcome, paid after the last action
    δ_t   = r_t + [t = A−1] R + V(s_{t+1}) − V(s_t)
    A_t   = δ_t + lam · A_{t+1}

  It is the same as G^lam_t − V(s_t) with the lam-return
  G^lam_t = r_t + (1 − lam) V(s_{t+1}) + lam G^lam_{t+1}.
  Source: arXiv:1506.02438 eq. 16 with gamma = 1.

  Args:
    group: rollouts of one task.
    lam: in [0, 1]; 0 trusts the table, 1 the trajectory's own return.
    visits: 'first' or 'every' visit of a trajectory to a state enters V.
    leave_one_out: keep a trajectory's own visits out of its baseline V(s_t);
      a state with no other visitor then keeps its own.
    normalize_std: divide by the deviation of the group's total returns.
    scale: divide by this constant as well, > 0.
    keep_uniform: also credit groups whose outcomes are all equal.

  Returns:
    One float32 array [A_i] per trajectory; zeros where it is not a member.

  Raises:
    ValueError: an option is out of its range.
  """
  _check(lam, visits, scale)
  advantages = members_lib.no_credit(group)
  keep = members_lib.members(group)
  if not keep_uniform and members_lib.is_uniform(group, keep):
    return advantages
  togo = {i: _returns_to_go(group.trajectories[i]) for i in keep}
  table = _value_table(group, togo, first_only=visits == 'first')
  deviation = 1.0
  if normalize_std and keep:
    # Returns that are equal but for rounding leave nothing to scale up.
    deviation = max(float(members_lib.returns(group, keep).std()), 1e-6)
  for i in keep:
    target_A = _lambda_returns(group.trajectories[i], table, lam)
    own = i if leave_one_out else None
    baseline_A = np.array(
        [table.value(t.state, own) for t in group.trajectories[i].turns]
    )
    advantages[i][:] = (target_A - baseline_A) / (deviation * scale)
  return advantages


class _Table:
  """Values of states: the mean return over visits, trajectory by trajectory."""

  def __init__(self):
    self._visits: dict[str, list[tuple[int, float]]] = collections.defaultdict(
        list
    )
    self._means: dict[tuple[str, int | None], float] = {}

  def add(self, state: str, member: int, value: float) -> None:
    """Records a visit; all are recorded before the first `value`."""
    self._visits[state].append((member, value))

  def value(self, state: str, without: int | None = None) -> float:
    """Returns V(state), from other trajectories than `without` if there are."""
    if (state, without) not in self._means:
      visits = self._visits[state]
      others = [value for member, value in visits if member != without]
      mean = np.mean(others or [value for _, value in visits])
      self._means[state, without] = float(mean)
    return self._means[state, without]


def _check(lam: float, visits: str, scale: float) -> None:
  if not 0 <= lam <= 1:
    raise ValueError(f'action_td: lam must be in [0, 1], not {lam}')
  if visits not in VISITS:
    raise ValueError(f'action_td: visits must be one of {VISITS}, not {visits}')
  if not scale > 0:
    raise ValueError(f'action_td: scale must be positive, not {scale}')


def _rewards(trajectory: types.Trajectory) -> np.ndarray:
  """Returns r_t with the outcome added to the last, float64 [A]."""
  rewards_A = np.array([t.reward for t in trajectory.turns], np.float64)
  rewards_A[-1] += trajectory.reward
  return rewards_A


def _returns_to_go(trajectory: types.Trajectory) -> np.ndarray:
  """Returns G_t, float64 [A]."""
  return np.cumsum(_rewards(trajectory)[::-1])[::-1]


def _value_table(group, togo, *, first_only: bool) -> _Table:
  table = _Table()
  for i, togo_A in togo.items():
    seen: set[str] = set()
    for turn, value in zip(group.trajectories[i].turns, togo_A):
      if first_only and turn.state in seen:
        continue
      seen.add(turn.state)
      table.add(turn.state, i, float(value))
  return table


def _lambda_returns(trajectory, table: _Table, lam: float) -> np.ndarray:
  """Returns G^lam_t, float64 [A], from the last action to the first."""
  rewards_A = _rewards(trajectory)
  out_A = np.zeros_like(rewards_A)
  next_value = next_return = 0.0  # the terminal state
  for t in reversed(range(len(rewards_A))):
    out_A[t] = rewards_A[t] + (1 - lam) * next_value + lam * next_return
    next_value = table.value(trajectory.turns[t].state)
    next_return = out_A[t]
  return out_A
