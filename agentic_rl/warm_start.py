"""Warm start: supervised learning on an imperfect scripted expert.

The traces go through the same packing, forward and log-prob head as rollouts.
Step s learns from traces that depend on the seed and on s only.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from agentic_rl import checkpoint as checkpoint_lib
from agentic_rl import setup_run
from agentic_rl import types
from agentic_rl import warm_source
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.policy import chat as chat_lib
from agentic_rl.policy import model
from agentic_rl.tasks import expert
from agentic_rl.tasks import sampler as sampler_lib
from configs import common


def run(run_: setup_run.Run, stop: threading.Event) -> Any | None:
  """Trains the first policy, or loads the one of this directory.

  Args:
    run_: the parts of the run.
    stop: ends it after the current step, with a checkpoint.

  Returns:
    The weights, or None if it was stopped.
  """
  config, c = run_.config, run_.config.warm_start
  weights = model.init(run_.policy, config.seed, run_.parallel)
  if c.weights:
    return _taken(run_, weights)
  if not c.steps:
    return weights
  learner = update.Learner(
      run_.policy,
      update.LossConfig('supervised', balance=c.balance),
      setup_run.optimizer_from(c.optimizer, c.steps, run_.policy),
      rows=c.rows,
      row_tokens=config.learner.row_tokens,
      parallel=run_.parallel,
  )
  tree = {'weights': weights, 'optimizer': learner.init(weights)}
  step, before_s, began = 0, 0.0, time.monotonic()
  saved = run_.restore('warm_start', tree)
  if saved is not None:
    step, tree, extra = saved
    before_s = extra['seconds']
    run_.warm_start_s = run_.earlier_s = before_s
  if step == c.steps:
    return tree['weights']
  traces = Traces(run_, learner)
  run_.metrics.start_phase('warm_start', c.steps, done=step)
  while step < c.steps and not stop.is_set():
    step_began = time.monotonic()
    batch = traces.batch(step)
    tree['weights'], tree['optimizer'], stats = learner.update(
        tree['weights'], tree['optimizer'], batch
    )
    update.check_finite(stats, f'warm start, step {step + 1}')
    step += 1
    run_.warm_start_s = before_s + time.monotonic() - began
    stats['tokens_per_s'] = stats['learner_tokens'] / (
        time.monotonic() - step_began
    )
    if step % 10 == 0 or step == c.steps:
      shown = ('loss', 'grad_norm', 'router/max_load', 'tokens_per_s')
      run_.metrics.log(step, stats, show=shown)
    else:
      run_.metrics.tick(step)
    if step % c.checkpoint_every == 0 or step == c.steps or stop.is_set():
      extra = {'seconds': run_.warm_start_s}
      run_.checkpoints('warm_start').save(step, tree, extra)
  return None if step < c.steps else tree['weights']


def _taken(run_: setup_run.Run, like: Any) -> Any:
  """Returns the weights of another run's warm start, and keeps them here."""
  saved = run_.restore('warm_start', {'weights': like})
  if saved is not None:
    return saved[1]['weights']
  folder = run_.config.warm_start.weights
  step, weights = warm_source.Source(folder).weights(like)
  digest = checkpoint_lib.params_sha256(weights)
  extra = {'seconds': 0.0, 'source': folder, 'params_sha256': digest}
  run_.checkpoints('warm_start').save(step, {'weights': weights}, extra)
  run_.metrics.note(f'Warm start: that of {folder}, weights {digest[:16]}.')
  return weights


# Traces of so many steps are packed together, which leaves less padding.
BLOCK = 4


class Traces:
  """Batches of expert traces; a batch depends on the seed and its step only.

  Args:
    run_: the parts of the run.
    learner: packs the traces.

  Raises:
    ConfigError: no trace of a block fits the policy's context.
  """

  def __init__(self, run_: setup_run.Run, learner: update.Learner):
    self._config = run_.config.warm_start
    self._learner = learner
    self._chat: chat_lib.Chat = run_.chat
    self._limit = run_.policy.max_context
    self._noise = expert.Noise(**dict(self._config.noise.items()))
    self._turns = common.options(run_.config.env).get('max_turns', 10)
    fresh = run_.config.tasks.fresh
    self._source = sampler_lib.FreshTasks(
        2 * run_.config.seed + 1, 'train', **dict(fresh.items())
    )
    self._block = -1
    self._packed: types.Batch

  def batch(self, step: int) -> types.Batch:
    """Returns the rows of a step; too long traces are left out."""
    block, place = divmod(step, BLOCK)
    if block != self._block:
      size = BLOCK * self._config.sequences
      indices = range(block * size, (block + 1) * size)
      examples = [e for i in indices if (e := self._example(i)) is not None]
      if not examples:
        raise common.ConfigError(
            f'policy.max_context={self._limit}: none of {size} expert traces'
            ' fits it; allowed is more'
        )
      packed = self._learner.pack(examples)
      used = np.flatnonzero((packed.weights_BT > 0).any(1))
      self._block, self._packed = block, pack_lib.take_rows(packed, used)
    # Few traces may fill fewer rows than a block has steps.
    first = place % len(self._packed.tokens_BT)
    return pack_lib.take_rows(self._packed, slice(first, None, BLOCK))

  def _example(self, index: int) -> pack_lib.Example | None:
    weight = np.array([0.0, 1.0, self._config.observation_weight], np.float32)
    task = self._source[index]
    turns = expert.simulate(task, index, self._noise, self._turns)
    tokens, kinds = self._chat.trace_ids(task.prompt, turns)
    if len(tokens) > self._limit:
      return None
    return pack_lib.from_text(tokens, weight[kinds])
