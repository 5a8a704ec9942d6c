"""The nouns of a run: Task, Action, Turn, Trajectory, Group, Batch.

Everything that flows between the stages is one of these. They hold NumPy
arrays and plain Python values only, so environments and tasks can use them
without importing JAX.

Dimension key, used as suffixes everywhere (`logprobs_BT`, `kv_MCKH`):

  P  prompts (tasks in a step)     N  query heads
  G  group size                    K  key/value heads
  U  turns                         H  head width
  A  actions                       F  expert width
  B  packed rows                   E  experts
  T  stream tokens                 V  vocabulary
  S  key positions                 L  layers
  D  model width                   M  pages in the pool
  W  pages per sequence            C  tokens per page
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from typing import Any, Mapping

import numpy as np


class Status(str, enum.Enum):
  """Why a rollout ended. Each status can carry its own reward."""

  SUBMITTED = 'submitted'  # the agent said that it is done
  LENGTH = 'length'  # the context is full
  TURN_LIMIT = 'turn_limit'  # the agent used all its turns
  TIME_LIMIT = 'time_limit'  # the rollout passed its deadline
  ENV_FAILURE = 'env_failure'  # infrastructure broke: never a reward of zero


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem, fully described by its content.

  Attributes:
    task_id: 16 hex digits, the hash of (env, prompt, payload).
    env: name of the environment that runs it, a key of `ENVIRONMENTS`.
    prompt: what the agent reads first.
    payload: JSON values that only the environment reads (files, tests).
    meta: JSON values for people and metrics (difficulty, templates); not part
      of the identity, never shown to the agent.
  """

  task_id: str
  env: str
  prompt: str
  payload: Mapping[str, Any]
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @classmethod
  def create(cls, env: str, prompt: str, payload, meta=None) -> Task:
    """Makes a task whose id is the hash of its content."""
    return cls(
        content_hash([env, prompt, payload]), env, prompt, payload, meta or {}
    )


@dataclasses.dataclass(frozen=True)
class Action:
  """One tool call and the tokens that the policy sampled to make it.

  Attributes:
    text: the call as the environment read it.
    name: the tool, or '' when the call was malformed.
    valid: False when the environment answered with an error.
    start: index of its first token in `Trajectory.tokens`.
    end: one past its last token (the end-of-action token is included).
  """

  text: str
  name: str
  valid: bool
  start: int
  end: int


@dataclasses.dataclass(frozen=True)
class Turn:
  """An action and what came back.

  Attributes:
    action: the tool call.
    state: key of the environment state in which the action was taken; equal
      keys in a group mean the same state (used by per-action credit).
    reward: reward that the action earned at once.
    observation: text that the environment returned.
    obs_start: index of the observation's first token.
    obs_end: one past its last token; equal to obs_start after the last turn.
  """

  action: Action
  state: str
  reward: float
  observation: str
  obs_start: int
  obs_end: int


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """The exact tokens of one rollout; text is never tokenised again.

  Attributes:
    rollout_id: unique in the run; with `seed` it fixes every random draw.
    task_id: the task that was attempted.
    seed: seed of the environment.
    tokens: int32 [T], prompt, actions and observations in order.
    sampled: bool [T], True where the policy drew the token.
    logp_behavior: float32 [T], log-prob of each sampled token under the policy
      that drew it, else 0.
    routes: int16 [T, L, topk] experts of each token in slot order, -1 where
      unknown, or None for a policy without experts; with the fields 'expert'
      and 'weight' (float32) where weights were recorded.
    weight_version: version of the weights that sampled it.
    turns: the actions with their observations.
    status: why it ended.
    reward: the outcome (the sum of rewards is `total_reward`).
    info: JSON values for logs (solved, wall seconds).
    support: int32 [T, k] tokens that each drawn token was drawn among, filled
      up with -1; None unless it was recorded.
  """

  rollout_id: int
  task_id: str
  seed: int
  tokens: np.ndarray
  sampled: np.ndarray
  logp_behavior: np.ndarray
  routes: np.ndarray | None
  weight_version: int
  turns: tuple[Turn, ...]
  status: Status
  reward: float
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  support: np.ndarray | None = None

  @property
  def total_reward(self) -> float:
    """Outcome plus the rewards inserted on the way."""
    return self.reward + sum(t.reward for t in self.turns)

  @property
  def failed(self) -> bool:
    """True when infrastructure broke: no baseline, no loss, only a count."""
    return self.status is Status.ENV_FAILURE


@dataclasses.dataclass(frozen=True)
class Group:
  """G rollouts of one task from one policy."""

  task: Task
  trajectories: tuple[Trajectory, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
  """Trajectories packed into rows for the learner.

  A row holds whole sequences, each starting on a page boundary; unused
  places have segment -1.

  Attributes:
    tokens_BT: int32, input token.
    targets_BT: int32, the token that follows in the same sequence, else 0.
    positions_BT: int32, position in the sequence.
    segments_BT: int32, number of the sequence within its row, -1 for padding.
    weights_BT: float32, loss weight of the target: 0 unless it is trained on.
    advantages_BT: float32, advantage of the action that owns the target.
    logp_behavior_BT: float32, log-prob recorded for the target.
    sampled_BT: bool, True where the target was drawn by the policy.
    routes_BTLk: int16 experts recorded for the input token, -1 if unknown; None
      for supervised data; with weights as in `Trajectory`.
    support_BTk: int32 tokens that the target was drawn among, filled up with
      -1; None unless it was recorded.
  """

  tokens_BT: np.ndarray
  targets_BT: np.ndarray
  positions_BT: np.ndarray
  segments_BT: np.ndarray
  weights_BT: np.ndarray
  advantages_BT: np.ndarray
  logp_behavior_BT: np.ndarray
  sampled_BT: np.ndarray
  routes_BTLk: np.ndarray | None = None
  support_BTk: np.ndarray | None = None


def content_hash(value: Any) -> str:
  """Returns 16 hex digits of the SHA-256 of the canonical JSON of `value`."""
  text = json.dumps(value, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()[:16]
