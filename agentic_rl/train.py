"""The whole run, top to bottom.

  tasks -> collect -> credit -> pack -> update -> publish -> log, checkpoint

A run is counted in steps, never in seconds, and every random draw is a function
of the seed and of a number that is saved, so a run that is killed and started
again ends with the same weights as one that was not.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import threading
import time
from typing import Any

import jax

from agentic_rl import checkpoint as checkpoint_lib
from agentic_rl import credit
from agentic_rl import evaluation
from agentic_rl import metrics as metrics_lib
from agentic_rl import monitor
from agentic_rl import setup_run
from agentic_rl import warm_start
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.rollout import collect
from agentic_rl.rollout import journal
from configs import common

SHOWN = (
    'rollout/solved', 'rollout/reward', 'rollout/turns',
    'rollout/malformed_share', 'credit/uniform_share', 'loss', 'entropy',
    'mismatch/unequal_bits', 'router/flips', 'iteration_s',
)  # fmt: skip


@dataclasses.dataclass
class State:
  """What the reinforcement phase carries from iteration to iteration.

  Attributes:
    weights: of the policy.
    optimizer: its state.
    iteration: iterations done; also the version of the weights.
    counts: sums over the run: tokens sampled, unequal bits, flips, updates
      skipped, seconds.
    before: evaluation before the first iteration.
    sampler: state of the task sampler after these iterations.
  """

  weights: Any
  optimizer: Any
  iteration: int = 0
  counts: dict[str, float] = dataclasses.field(
      default_factory=lambda: dict.fromkeys(
          (
              'tokens_sampled', 'compared', 'unequal', 'flips', 'skipped',
              'wall_s',
          ),
          0,
      )
  )  # fmt: skip
  before: dict[str, Any] = dataclasses.field(default_factory=dict)
  sampler: dict[str, Any] = dataclasses.field(default_factory=dict)


def train(config, workdir, stop: threading.Event | None = None):
  """Trains a policy.

  Args:
    config: from a file in `configs/`.
    workdir: where everything is written; a run that is there is resumed.
    stop: set to end the run cleanly after the current step.

  Returns:
    The summary, also in `summary.json`; None if the run was stopped early.

  Raises:
    ConfigError: a field has no sense, or the directory holds another run.
    CheckpointError: checkpoints can not be written, or all are corrupt.
    EnvironmentFailure: the sandbox does not work on this machine.
    MismatchError: sampler and learner disagreed, see `monitor`.
    DivergedError: the gradient is not finite.
  """
  began = time.monotonic()
  stop = stop or threading.Event()
  workdir = pathlib.Path(workdir)

  # ---------------------------------------------------------------- setting up
  run = setup_run.setup(config, workdir)  # everything that can be wrong, first
  with run:
    if run.summary is not None:
      print(f'Finished already: see {workdir}/summary.json.')
      return run.summary

    # -------------------------------------------------------------- warm start
    weights = warm_start.run(run, stop)
    if weights is None:
      return _stopped(run)

    # ------------------------------------------------------------------ resume
    sampler = run.sampler
    state = State(weights, run.learner.init(weights), sampler=sampler.state())
    reference = jax.tree.map(lambda a: a.copy(), weights)
    saved = run.restore('rl', _tree(state))
    if saved is not None:
      state.iteration, tree, extra = saved
      state.weights, state.optimizer = tree['weights'], tree['optimizer']
      state.counts |= extra['counts']
      state.before, state.sampler = extra['before'], extra['sampler']
      sampler.restore(state.sampler)
      run.metrics.note(
          f'Resumed after iteration {state.iteration} of'
          f' {config.learner.iterations}.'
      )
    else:
      state.counts['wall_s'] = run.earlier_s
    run.stack.push(functools.partial(_keep_on_mismatch, run, state))

    # -------------------------------------------------------------- evaluation
    if not state.before:
      before = evaluation.evaluate(run, state.weights, 0, 'before', stop)
      if before is None:
        return _stopped(run)
      state.before = before

    # --------------------------------------------------- reinforcement learning
    total = config.learner.iterations
    run.metrics.start_phase('rl', total, done=state.iteration)
    clock = _Clock(state.counts, began)
    while state.iteration < total and not stop.is_set():
      iteration_began = time.monotonic()
      tasks = sampler.next_batch(config.rollout.tasks)  # P tasks
      groups, stats = rollouts(run, state, tasks)  # P groups of G
      advantages, credit_stats = credit.assign(  # [P][G] arrays [A]
          groups, config.credit.name, **common.options(config.credit)
      )
      journal.write(
          journal.path_of(workdir, 'rl', state.iteration + 1),
          [t for g in groups for t in g.trajectories],
          [a for row in advantages for a in row],
      )
      examples = [
          pack_lib.from_trajectory(t, a)
          for group, row in zip(groups, advantages)
          for t, a in zip(group.trajectories, row)
          if not t.failed and len(t.turns)
      ]
      stats |= {f'credit/{k}': v for k, v in credit_stats.items()}
      learn_began = time.monotonic()
      if examples:
        batch = run.learner.pack(examples)  # [B, T]
        stats |= learn(run, state, batch, reference, stats)
      state.iteration += 1
      state.sampler = sampler.state()
      stats['learner/wall_s'] = time.monotonic() - learn_began
      stats['iteration_s'] = time.monotonic() - iteration_began
      state.counts['tokens_sampled'] += int(stats['rollout/sampled_tokens'])
      run.metrics.log(state.iteration, stats, show=SHOWN)
      every = config.evaluation.every
      if every and state.iteration % every == 0 and state.iteration < total:
        evaluation.evaluate(run, state.weights, state.iteration, 'heldout')
      clock.update()
      if state.iteration % config.checkpoint.rl_every == 0 or stop.is_set():
        _save(run, state)
    if state.iteration < total:
      return _stopped(run)

    # ----------------------------------------------------------------- finished
    _save(run, state)
    after = evaluation.evaluate(run, state.weights, total, 'after', stop)
    if after is None:
      return _stopped(run)
    clock.update()
    return _finish(run, state, after)


def rollouts(run: setup_run.Run, state: State, tasks):
  """Publishes the weights and collects a group for each task.

  Args:
    run: the parts of the run.
    state: its weights sample.
    tasks: P tasks.

  Returns:
    P groups of G trajectories, and the metrics of publication and collection.

  Raises:
    EnvironmentFailure: no environment worked.
    MismatchError: the sampler holds other weights, and the run stops on it.
  """
  config = run.config
  group = config.rollout.group
  first = state.iteration * config.rollout.tasks * group
  # One program, one copy of the weights: publishing moves no bytes.
  published = monitor.publish(run, state.weights, state.iteration)
  trajectories, stats = run.collector.collect(
      collect.group_requests(tasks, group, first, config.seed),
      lambda done, all_: run.metrics.tick(
          state.iteration, f'rollouts {done}/{all_}'
      ),
  )
  collect.check_environments(trajectories, f'iteration {state.iteration}')
  return collect.groups_of(tasks, trajectories), stats | published


def learn(run: setup_run.Run, state: State, batch, reference, stats):
  """Takes an optimizer step on a batch, unless it is to be skipped.

  Args:
    run: the parts of the run.
    state: its weights and optimizer state move on.
    batch: [B, T], packed.
    reference: weights of the reference policy.
    stats: of the publication.

  Returns:
    The metrics of the batch.

  Raises:
    MismatchError: sampler and learner disagree, and the run stops on it.
    DivergedError: the gradient is not finite.
  """
  step = state.iteration + 1
  found = run.learner.accumulate(state.weights, batch, reference)
  learned = found.stats
  update.check_finite(learned, f'iteration {step}')
  applied = monitor.may_apply(run, step, stats | learned)
  if applied:
    state.weights, state.optimizer, learned = run.learner.apply(
        state.weights, state.optimizer, found
    )
    update.check_finite(learned, f'iteration {step}')
  state.counts['compared'] += int(learned['mismatch/compared'])
  state.counts['unequal'] += int(learned['mismatch/unequal_bits'])
  state.counts['flips'] += int(learned['router/flips'])
  state.counts['skipped'] += not applied
  return {**learned, 'mismatch/skipped': float(not applied)}


# --------------------------------------------------------------------- details


class _Clock:
  """Adds wall seconds to the counts, across interruptions."""

  def __init__(self, counts: dict[str, float], began: float):
    self._counts, self._last = counts, began

  def update(self) -> None:
    now = time.monotonic()
    self._counts['wall_s'] += now - self._last
    self._last = now


def _tree(state: State) -> dict[str, Any]:
  return {'weights': state.weights, 'optimizer': state.optimizer}


def _save(run: setup_run.Run, state: State) -> None:
  extra = {
      'counts': state.counts,
      'before': state.before,
      'sampler': state.sampler,
  }
  run.checkpoints('rl').save(state.iteration, _tree(state), extra)


def _keep_on_mismatch(run: setup_run.Run, state: State, kind, *unused) -> None:
  """Saves the state that a mismatch stopped, when the run is left."""
  if kind is monitor.MismatchError:
    _save(run, state)


def _stopped(run: setup_run.Run) -> None:
  for checkpoints in run.open_checkpoints():
    checkpoints.wait()
  run.metrics.note(
      f'Stopped. The same command with --workdir={run.workdir} resumes.'
  )


def _finish(run: setup_run.Run, state: State, after) -> dict[str, Any]:
  """Writes summary and learning curve and says where everything is."""
  counts, before = state.counts, state.before
  summary = {
      'heldout_solve_before': before['solve'],
      'heldout_solve_before_interval': before['interval'],
      'heldout_solve_after': after['solve'],
      'heldout_solve_after_interval': after['interval'],
      'heldout_greedy_before': before['greedy'],
      'heldout_greedy_after': after['greedy'],
      'heldout_tasks': run.config.evaluation.tasks,
      'wall_s': round(counts['wall_s'], 1),
      'warm_start_s': round(run.warm_start_s, 1),
      'iterations': state.iteration,
      'tokens_sampled': int(counts['tokens_sampled']),
      'compared_logprobs': int(counts['compared']),
      'unequal_logprob_bits': int(counts['unequal']),
      'route_flips': int(counts['flips']),
      'skipped_updates': int(counts['skipped']),
      'weights_hash': run.engine.weights_hashes[0],
      'params_sha256': checkpoint_lib.params_sha256(state.weights),
      'peak_memory_gb': round(setup_run.peak_memory_gb(), 2),
      'config_hash': common.config_hash(run.config),
  }
  heldout = [
      {
          'step': step,
          'heldout': result['solve'],
          'heldout_low': result['interval'][0],
          'heldout_high': result['interval'][1],
      }
      for step, result in ((0, before), (state.iteration, after))
  ]
  metrics_lib.learning_curve_png(
      run.workdir / 'learning_curve.png',
      [*run.metrics.rows('rl'), *heldout],
      keys=(
          'rollout/solved', 'heldout', 'rollout/turns', 'entropy',
          'rollout/malformed_share', 'iteration_s',
      ),  # fmt: skip
      title=f'Reinforcement learning, seed {run.config.seed}',
  )
  # Last: a directory with a summary is finished.
  metrics_lib.write_summary(run.workdir / 'summary.json', summary)
  low, high = (round(100 * x, 1) for x in before['interval'])
  low_after, high_after = (round(100 * x, 1) for x in after['interval'])
  run.metrics.note(
      f'Held-out tasks solved at temperature {run.config.sampling.temperature}:'
      f' {before["solve"]:.1%} [{low}, {high}] -> {after["solve"]:.1%}'
      f' [{low_after}, {high_after}]; greedy {before["greedy"]:.1%} ->'
      f' {after["greedy"]:.1%}.\n'
      f'Log-probs that differ between sampler and learner:'
      f' {summary["unequal_logprob_bits"]} of {summary["compared_logprobs"]};'
      f' routes: {summary["route_flips"]}; updates skipped:'
      f' {summary["skipped_updates"]} of {state.iteration}.\n'
      f'Everything is in {run.workdir}: summary.json, learning_curve.png,'
      f' metrics.jsonl, trajectories/, checkpoints/.\n'
      f'Next: tensorboard --logdir={run.workdir}/tensorboard, or another'
      f' estimator with --config.credit.name=grpo --workdir=runs/grpo.'
  )
  return summary
