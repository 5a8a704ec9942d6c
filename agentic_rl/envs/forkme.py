"""The smallest complete environment, made to be copied.

The agent guesses a number: `guess 7` is answered by `higher`, `lower` or
`right`. To add an environment: copy this file, change it, add a line to
`ENVIRONMENTS` in `envs/__init__.py`.

A task's payload:
  low, high: the number is drawn from this range by the episode's seed
"""

from __future__ import annotations

import random
import time
from typing import Any, Mapping

from agentic_rl import types
from agentic_rl.envs import grammar
from agentic_rl.envs import protocol


class GuessEnvironment:
  """Guess a number.

  Args:
    shared: a dict of the worker, for what environments share; not used here.
    max_turns: guesses in an episode.
    malformed_penalty: subtracted at once for an action that is no guess.
  """

  def __init__(
      self,
      *,
      shared: dict[str, Any] | None = None,
      max_turns: int = 8,
      malformed_penalty: float = 0.05,
  ):
    del shared
    if max_turns < 1 or malformed_penalty < 0:
      raise ValueError('max_turns must be >= 1 and malformed_penalty >= 0')
    self._max_turns = max_turns
    self._malformed_penalty = malformed_penalty
    # All that an episode is, as JSON values: snapshot and restore come free.
    self._episode: dict[str, Any] = {}

  async def check(self) -> None:
    """Nothing to check: no sandbox here."""

  async def reset(
      self, seed: int, task: types.Task
  ) -> tuple[str, dict[str, Any]]:
    """Draws the number; the observation is the prompt."""
    low, high = task.payload['low'], task.payload['high']
    self._episode = dict(
        number=random.Random(seed).randint(low, high),
        # What the agent knows, in a form that the order of guesses can't alter.
        low=low,
        high=high,
        turns=0,
        status='',
    )
    return task.prompt, {'state': self._state()}

  async def step(self, action_text: str) -> protocol.Transition:
    """Takes one action: (obs, reward, terminated, truncated, info)."""
    start = time.perf_counter()
    episode = self._running()
    guess = _parse(action_text)
    reward, terminated = 0.0, False
    if isinstance(guess, str):
      obs, reward = f'ERR {guess}', -self._malformed_penalty
    elif guess == episode['number']:
      obs, terminated = 'right', True
    elif guess < episode['number']:
      obs = 'higher'
      episode['low'] = max(episode['low'], guess + 1)
    else:
      obs = 'lower'
      episode['high'] = min(episode['high'], guess - 1)
    episode['turns'] += 1
    truncated = not terminated and episode['turns'] >= self._max_turns
    info: dict[str, Any] = {
        'name': '' if isinstance(guess, str) else 'guess',
        'valid': not isinstance(guess, str),
    }
    if terminated:
      info |= self._finish(types.Status.SUBMITTED, 1.0)
    if truncated:
      info |= self._finish(types.Status.TURN_LIMIT, 0.0)
    info |= {'state': self._state(), 'env_s': time.perf_counter() - start}
    return obs, reward, terminated, truncated, info

  async def end(self, status: types.Status) -> dict[str, Any]:
    """Ends an episode that was cut; returns the final info."""
    self._running()
    info = self._finish(types.Status(status), 0.0)
    return info | {'state': self._state(), 'env_s': 0.0}

  def snapshot(self) -> dict[str, Any]:
    """Returns the episode as JSON values."""
    return dict(self._episode)

  async def restore(self, state: Mapping[str, Any]) -> None:
    """Continues the episode of a snapshot."""
    self._episode = dict(state)

  async def close(self) -> None:
    """Frees the episode."""
    self._episode = {}

  def _running(self) -> dict[str, Any]:
    if not self._episode or self._episode['status']:
      raise RuntimeError('no episode is running: call reset')
    return self._episode

  def _finish(self, status: types.Status, outcome: float) -> dict[str, Any]:
    self._episode['status'] = status.value
    return {'status': status.value, 'outcome': outcome}

  def _state(self) -> str:
    return types.content_hash(self._episode)


def _parse(text: str) -> int | str:
  """Returns the guess, or why there is none."""
  words = text.split()
  if len(words) != 2 or words[0] != 'guess':
    return 'say: guess NUMBER'
  if not (words[1].isascii() and words[1].isdigit() and len(words[1]) < 10):
    return f'no number {grammar.shown(words[1])}'
  return int(words[1])
