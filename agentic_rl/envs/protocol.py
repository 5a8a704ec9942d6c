"""The Environment protocol: Gymnasium's five values, with text, async.

Stands between a task and a rollout: the collector sends the text of an action
and gets the text of an observation back. An environment is plain Python
without JAX, and lives in a worker process (`pool.py`).

`info`, a dict of JSON values, always holds
  state: key of the environment's state; equal keys mean the same state
and after a step also
  name: the tool that was called, '' when the call was malformed
  valid: False when the environment answered with an error
  env_s: wall seconds that the step took
and once the episode has ended
  status: the value of a `types.Status`
  outcome: the final outcome, not part of `reward`; None for env_failure
"""

from __future__ import annotations

from typing import Any, Mapping, Protocol

from agentic_rl import types

Observation = tuple[str, dict[str, Any]]
Transition = tuple[str, float, bool, bool, dict[str, Any]]


class EnvironmentFailure(RuntimeError):
  """Infrastructure broke. Never a reward of zero: the rollout is left out."""


class Environment(Protocol):
  """One episode at a time of one kind of task.

  The constructor takes options by keyword and raises `ValueError` for one that
  it does not know. It also takes `shared`, a dict that lives as long as the
  worker: environments of one worker keep there what they can share.
  """

  async def check(self) -> None:
    """Raises `EnvironmentFailure` if this machine can not run episodes."""

  async def reset(self, seed: int, task: types.Task) -> Observation:
    """Starts an episode; the observation is the prompt."""

  async def step(self, action_text: str) -> Transition:
    """Takes one action: (obs, reward, terminated, truncated, info).

    Whatever the text, the answer is an observation. Raises only
    `EnvironmentFailure`, or `RuntimeError` when no episode is running.
    """

  async def end(self, status: types.Status) -> dict[str, Any]:
    """Ends an episode that the collector cut; returns the final info."""

  def snapshot(self) -> Mapping[str, Any]:
    """Returns the episode as JSON values."""

  async def restore(self, state: Mapping[str, Any]) -> None:
    """Continues the episode of a snapshot, also in another process."""

  async def close(self) -> None:
    """Frees everything. May be called twice."""
