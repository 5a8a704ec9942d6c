"""Held-out evaluation: the training's own rollouts, on tasks it never saw."""

from __future__ import annotations

import math
import threading
from typing import Any

from agentic_rl import monitor
from agentic_rl import setup_run
from agentic_rl.rollout import collect
from agentic_rl.rollout import journal

# Rollout ids of evaluations; training counts from 0.
_FIRST_ID = 1 << 30


class _Stopped(Exception):
  """The user does not want to wait for the end of an evaluation."""


def evaluate(
    run: setup_run.Run,
    weights: Any,
    step: int,
    name: str,
    stop: threading.Event | None = None,
) -> dict[str, Any] | None:
  """Solves the held-out tasks once by sampling and once greedily.

  Every evaluation uses the same tasks and random streams, so that two policies
  are compared on equal draws.

  Args:
    run: the parts of the run.
    weights: of the policy.
    step: iteration, for the logs.
    name: of the trajectory file.
    stop: when set, nothing is kept and None is returned.

  Returns:
    solve: share solved by sampling; interval: its 95 % Wilson interval; greedy:
    share solved greedily.

  Raises:
    EnvironmentFailure: no environment worked.
    MismatchError: the sampler holds other weights, and the run stops on it.
  """
  c = run.config.evaluation
  run.metrics.start_phase('heldout', None)
  published = monitor.publish(run, weights, step)
  stop = stop or threading.Event()
  first_greedy = 2 * _FIRST_ID - 1 - (1 << 20)
  try:
    sampled, stats = _collect(run, c.tasks, _FIRST_ID, False, stop)
    greedy, _ = _collect(run, c.greedy_tasks, first_greedy, True, stop)
  except _Stopped:
    return None
  path = journal.path_of(run.workdir, name, step)
  journal.write(path, [*sampled, *greedy])
  solved = [t.info['solved'] for t in sampled if not t.failed]
  result = {
      'solve': sum(solved) / max(1, len(solved)),
      'interval': list(wilson(sum(solved), len(solved))),
      'greedy': _share(greedy),
  }
  values = {k: v for k, v in result.items() if k != 'interval'}
  values |= {k: v for k, v in stats.items() if k.startswith('rollout/')}
  values |= published
  run.metrics.log(
      step,
      values,
      phase='heldout',
      show=('solve', 'greedy', 'rollout/turns', 'rollout/decode_tokens_per_s'),
  )
  return result


def _collect(run, count: int, first_id: int, greedy: bool, stop):
  requests = [
      collect.Request(first_id + i, task, run.config.seed)
      for i, task in enumerate(run.heldout[:count])
  ]
  label = 'greedy' if greedy else 'sampled'

  def progress(done: int, total: int) -> None:
    if stop.is_set():
      raise _Stopped
    run.metrics.tick(0, f'{label} {done}/{total}')

  run.engine.greedy = greedy
  try:
    trajectories, stats = run.collector.collect(requests, progress)
  finally:
    run.engine.greedy = False
  collect.check_environments(trajectories, f'held-out evaluation, {label}')
  return trajectories, stats


def _share(trajectories) -> float:
  good = [t.info['solved'] for t in trajectories if not t.failed]
  return sum(good) / max(1, len(good))


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
  """Returns the Wilson score interval of a share (Wilson 1927).

  Args:
    successes: 0..trials.
    trials: 0 or more; 0 gives (0, 1).
    z: quantile of the normal distribution; 1.96 for 95 %.
  """
  if not trials:
    return 0.0, 1.0
  p, n = successes / trials, trials
  middle = (p + z * z / (2 * n)) / (1 + z * z / n)
  half = math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) * z / (1 + z * z / n)
  return max(0.0, middle - half), min(1.0, middle + half)
