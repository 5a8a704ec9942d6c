"""Collects rollouts: the engine draws, environments answer, trajectories grow.

Token in, token out: a trajectory is the sequence of sampled and observed ids,
never text that was tokenised again. The engine works on whatever is ready while
environments answer in their own processes; since a rollout is a function of
(weights, task, seeds), their order changes nothing but the time it takes.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any, Callable, Sequence, cast

import numpy as np

from agentic_rl import types
from agentic_rl.envs import pool as pool_lib
from agentic_rl.envs import protocol
from agentic_rl.policy import chat as chat_lib
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib


@dataclasses.dataclass(frozen=True)
class Request:
  """One rollout to collect.

  Attributes:
    rollout_id: unique in the run; names the random stream.
    task: what to attempt.
    seed: of the environment.
  """

  rollout_id: int
  task: types.Task
  seed: int


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of a rollout.

  Attributes:
    action_tokens: longest action; a longer one is cut and sent as it is.
    deadline_s: wall seconds until the rollout is ended with `time_limit`.
  """

  action_tokens: int = 32
  deadline_s: float = 300.0

  def __post_init__(self):
    if self.action_tokens < 1 or self.deadline_s <= 0:
      raise ValueError(
          f'action_tokens={self.action_tokens}, deadline_s={self.deadline_s}:'
          ' both must be positive'
      )


@dataclasses.dataclass
class _Rollout:
  """A rollout on its way."""

  request: Request
  began_s: float
  slot: int = -1
  prompt: list[int] = dataclasses.field(default_factory=list)
  action: list[int] = dataclasses.field(default_factory=list)
  action_start: int = 0
  logps: dict[int, float] = dataclasses.field(default_factory=dict)
  supports: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
  state: str = ''
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
  pending: types.Turn | None = None
  env_s: float = 0.0


class Collector:
  """Runs many rollouts at once over one engine and one pool of environments.

  Args:
    engine: the sampler.
    pool: the environments.
    chat: the token format.
    limits: bounds of a rollout.
  """

  def __init__(
      self,
      engine: engine_lib.Engine | engines_lib.Engines,
      pool: pool_lib.EnvPool,
      chat: chat_lib.Chat,
      limits: Limits,
  ):
    self.engine, self.pool, self.chat = engine, pool, chat
    self.limits = limits
    self._live: dict[int, _Rollout] = {}
    self._by_slot: dict[int, _Rollout] = {}
    self._ready: collections.deque[_Rollout] = collections.deque()
    self._finished: dict[int, types.Trajectory] = {}

  def collect(
      self,
      requests: Sequence[Request],
      progress: Callable[[int, int], None] = lambda done, total: None,
  ) -> tuple[list[types.Trajectory], dict[str, float]]:
    """Runs all requests to their end.

    Args:
      requests: rollouts with distinct ids.
      progress: called with (finished, all) whenever one ends.

    Returns:
      Trajectories in the order of the requests, and metrics of the collection.

    Raises:
      ValueError: if two requests share an id, or a prompt does not fit.
    """
    if len({r.rollout_id for r in requests}) != len(requests):
      raise ValueError('two requests share a rollout_id')
    began, counts = time.monotonic(), self.engine.counts
    stats = self.pool.stats()
    waiting = collections.deque(requests)
    self._finished, done, idle_s = {}, 0, 0.0
    try:
      while len(self._finished) < len(requests):
        while waiting and len(self._live) < self.engine.max_sequences:
          self._begin(waiting.popleft())
        t = time.monotonic()
        for result in self.pool.poll(0.0 if self.engine.busy else 0.25):
          self._answer(result)
        if not self.engine.busy:
          idle_s += time.monotonic() - t
        self._insert_ready()
        self._take_drawn(self.engine.generate())
        self._end_late()
        if len(self._finished) > done:
          done = len(self._finished)
          progress(done, len(requests))
    finally:
      self._abandon()
    trajectories = [self._finished[r.rollout_id] for r in requests]
    self._finished = {}
    wall = time.monotonic() - began
    new = {k: v - counts[k] for k, v in self.engine.counts.items()}
    later = self.pool.stats()
    return trajectories, {
        'rollout/wall_s': wall,
        'rollout/env_wait_s': idle_s,
        'rollout/env_wait_share': idle_s / max(wall, 1e-9),
        'rollout/env_s': later['env_s'] - stats['env_s'],
        'rollout/decode_tokens_per_s': new['decoded'] / max(wall, 1e-9),
        'rollout/prefill_tokens': float(new['prefilled']),
        'rollout/engine_steps': float(new['steps']),
        'rollout/kv_hit_rate': new['kv_hits']
        / max(1, new['kv_hits'] + new['kv_misses']),
        'rollout/kv_pages_peak': float(self.engine.counts['kv_peak']),
        **trajectory_metrics(trajectories),
    }

  # --- the life of a rollout ---

  def _begin(self, request: Request) -> None:
    self._live[request.rollout_id] = _Rollout(request, time.monotonic())
    self.pool.submit_reset(request.rollout_id, request.seed, request.task)

  def _insert_ready(self) -> None:
    while self._ready and self.engine.can_insert():
      rollout = self._ready.popleft()
      slot = self.engine.insert(rollout.request.rollout_id, rollout.prompt)
      rollout.slot, rollout.action_start = slot, len(rollout.prompt)
      self._by_slot[slot] = rollout

  def _take_drawn(self, drawn: Sequence[engine_lib.Drawn]) -> None:
    for item in drawn:
      rollout = self._by_slot[item.slot]
      place = rollout.action_start + len(rollout.action)
      rollout.action.append(item.token)
      rollout.logps[place] = item.logp
      if item.support is not None:
        rollout.supports[place] = item.support
      full = self.engine.length(item.slot) >= self.engine.cfg.max_context
      ended = item.token == self.chat.end
      if ended or full or len(rollout.action) >= self.limits.action_tokens:
        self.engine.pause(item.slot)
        text = self.chat.action_text(rollout.action)
        if full and not ended:
          self._cut(rollout, types.Status.LENGTH)
        else:
          self.pool.submit_step(rollout.request.rollout_id, text)

  def _answer(self, result: pool_lib.EnvResult) -> None:
    rollout = self._live.get(cast(int, result.env_id))
    if rollout is None:
      return
    info = result.info
    rollout.env_s += float(info.get('env_s', 0.0))
    if result.error is not None:
      self._finish(rollout, types.Status.ENV_FAILURE, 0.0, result.error)
    elif result.kind == 'reset':
      rollout.state = info['state']
      rollout.prompt = self.chat.prompt_ids(result.obs)
      self._ready.append(rollout)
    elif result.kind == 'end':
      self._finish(rollout, types.Status(info['status']), info['outcome'])
    else:
      self._book_turn(rollout, result)

  def _book_turn(self, rollout: _Rollout, result: pool_lib.EnvResult) -> None:
    info, start = result.info, rollout.action_start
    end = start + len(rollout.action)
    over = result.terminated or result.truncated
    ids = [] if over else self.chat.observation_ids(result.obs)
    fits = end + len(ids) < self.engine.cfg.max_context
    if not fits:
      ids = []
    action = types.Action(
        self.chat.action_text(rollout.action),
        info['name'],
        bool(info['valid']),
        start,
        end,
    )
    rollout.turns.append(
        types.Turn(
            action,
            rollout.state,
            float(result.reward),
            result.obs,
            end,
            end + len(ids),
        )
    )
    rollout.state, rollout.action = info['state'], []
    rollout.action_start = end + len(ids)
    if over:
      self._finish(rollout, types.Status(info['status']), info['outcome'])
    elif not fits:
      self._cut(rollout, types.Status.LENGTH)
    else:
      self.engine.prefill(rollout.slot, ids)

  def _cut(self, rollout: _Rollout, status: types.Status) -> None:
    """Ends a rollout from outside; the environment gives the outcome."""
    if rollout.action:  # an unfinished action is an action, but no call
      start = rollout.action_start
      end = start + len(rollout.action)
      text = self.chat.action_text(rollout.action)
      action = types.Action(text, '', False, start, end)
      turn = types.Turn(action, rollout.state, 0.0, '', end, end)
      rollout.turns.append(turn)
      rollout.action = []
    self.pool.submit_end(rollout.request.rollout_id, status)

  def _end_late(self) -> None:
    """Ends rollouts past their deadline that are drawing or waiting to."""
    limit = time.monotonic() - self.limits.deadline_s
    for rollout in list(self._live.values()):
      drawing = rollout.slot >= 0 and not self.engine.paused(rollout.slot)
      if rollout.began_s < limit and drawing:
        self.engine.pause(rollout.slot)
        self._cut(rollout, types.Status.TIME_LIMIT)

  def _finish(
      self,
      rollout: _Rollout,
      status: types.Status,
      outcome: float,
      error: str | None = None,
  ) -> None:
    request = rollout.request
    if rollout.slot >= 0:
      tokens, routes = self.engine.release(rollout.slot)
      del self._by_slot[rollout.slot]
    else:
      cfg = self.engine.cfg
      tokens = []
      routes = np.zeros((0, cfg.moe_layers, cfg.topk_experts), np.int16)
    sampled = np.zeros(len(tokens), bool)
    logps = np.zeros(len(tokens), np.float32)
    places = list(rollout.logps)
    sampled[places] = True
    logps[places] = list(rollout.logps.values())
    support = engine_lib.supports(rollout.supports, len(tokens))
    info: dict[str, Any] = {
        'solved': outcome >= 1,
        'env_s': round(rollout.env_s, 4),
        'wall_s': round(time.monotonic() - rollout.began_s, 4),
    }
    if error is not None:
      info['error'] = error
    self._finished[request.rollout_id] = types.Trajectory(
        rollout_id=request.rollout_id,
        task_id=request.task.task_id,
        seed=request.seed,
        tokens=np.asarray(tokens, np.int32),
        sampled=sampled,
        logp_behavior=logps,
        routes=routes,
        weight_version=self.engine.version,
        turns=tuple(rollout.turns),
        status=status,
        reward=float(outcome),
        info=info,
        support=support,
    )
    del self._live[request.rollout_id]
    self.pool.submit_close(request.rollout_id)

  def _abandon(self) -> None:
    """Frees what is still live after an error or an interrupt."""
    for rollout in list(self._live.values()):
      if rollout.slot >= 0:
        self.engine.release(rollout.slot)
      self.pool.submit_close(rollout.request.rollout_id)
    self._live.clear()
    self._by_slot.clear()
    self._ready.clear()


def group_requests(
    tasks: Sequence[types.Task], group: int, first_id: int, seed: int
) -> list[Request]:
  """Returns `group` requests per task with consecutive rollout ids."""
  return [
      Request(first_id + i * group + g, task, seed)
      for i, task in enumerate(tasks)
      for g in range(group)
  ]


def check_environments(
    trajectories: Sequence[types.Trajectory], where: str
) -> None:
  """Raises EnvironmentFailure if no trajectory has a working environment.

  A failure now and then is left out of every mean; nothing but failures is no
  result.

  Args:
    trajectories: of one collection, at least one.
    where: for the message.
  """
  if all(t.failed for t in trajectories):
    why = trajectories[0].info.get('error', 'no reason was given')
    raise protocol.EnvironmentFailure(
        f'{where}: all {len(trajectories)} rollouts failed, the first with: {why}'
    )


def groups_of(
    tasks: Sequence[types.Task], trajectories: Sequence[types.Trajectory]
) -> list[types.Group]:
  """Returns the groups of trajectories that `group_requests` ordered."""
  size = len(trajectories) // len(tasks)
  return [
      types.Group(task, tuple(trajectories[i * size : (i + 1) * size]))
      for i, task in enumerate(tasks)
  ]


def trajectory_metrics(
    trajectories: Sequence[types.Trajectory],
) -> dict[str, float]:
  """Returns means over the trajectories that infrastructure did not break."""
  good = [t for t in trajectories if not t.failed]
  actions = [turn.action for t in good for turn in t.turns]
  mean = lambda values: float(np.mean(values)) if len(values) else 0.0
  out = {
      'rollout/solved': mean([t.info['solved'] for t in good]),
      'rollout/reward': mean([t.total_reward for t in good]),
      'rollout/turns': mean([len(t.turns) for t in good]),
      'rollout/tokens': mean([len(t.tokens) for t in good]),
      'rollout/sampled_tokens': float(sum(t.sampled.sum() for t in good)),
      'rollout/malformed_share': mean([not a.name for a in actions]),
      'rollout/invalid_share': mean([not a.valid for a in actions]),
  }
  for status in types.Status:
    share = [t.status is status for t in trajectories]
    out[f'status/{status.value}'] = mean(share)
  return out
