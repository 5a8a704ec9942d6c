"""Watches that sampler and learner are the same policy, and acts when not.

Two checks in every iteration: after a publication the sampler's weights have
the hash of the learner's, and all devices' copies of them are equal; and before
an optimizer step the log-probs and routes recorded with the batch are those of
the gradient program. An exact policy is expected to give zeros; the bounds of
`config.alerts` on `mismatch/*` and `router/flip*` hold for every policy.
`config.learner.on_mismatch` says what
happens otherwise:

  warn  an alert is recorded, the run goes on
  skip  the batch is not learnt from either: weights and optimizer state stay
        as they are, the iteration counts
  stop  the run ends before the step, with a checkpoint of the state before it
"""

from __future__ import annotations

from typing import Any, Mapping

from agentic_rl import setup_run
from agentic_rl.policy import identity
from agentic_rl.rollout import journal

WEIGHTS = 'publish/unequal_weights'
# Expected to be 0 for an exact policy, the hash for every one.
ZEROS = (
    'mismatch/unequal_bits', 'router/flips', 'mismatch/max_abs_ratio_dev',
    WEIGHTS,
)  # fmt: skip
# Where nothing is compared, nothing differs: these are never 0.
COMPARED = ('mismatch/compared', 'router/compared')
BOUNDED = ('mismatch/', 'router/flip')


class MismatchError(RuntimeError):
  """Sampler and learner disagreed although they must not."""


def publish(run: setup_run.Run, weights: Any, version: int) -> dict[str, Any]:
  """Gives weights to the sampler and checks that it holds them.

  Args:
    run: the parts of the run.
    weights: of the learner.
    version: of the weights: iterations done.

  Returns:
    `publish/weights_hash`, hex digits of the first engine's weights;
    `publish/bytes_moved`, 0 if engines read the learner's own memory;
    `publish/unequal_weights`, how many engines hold other weights, and how many
    devices another copy of them than the first.

  Raises:
    MismatchError: one holds other weights, and the run stops on it.
  """
  run.engine.load_params(weights, version)
  want, have = identity.weights_hash(weights), run.engine.weights_hashes
  unequal = sum(h != want for h in have)
  # A hash is that of one copy.
  trees = {id(tree): tree for tree in (weights, *run.engine.weights)}
  apart = sum(map(identity.unequal_devices, trees.values()))
  if unequal or apart:
    text = (
        f'after the publication of version {version} the learner holds weights'
        f' of hash {want}, the sampler of {", ".join(have)}; {apart} devices'
        ' hold other copies than the first'
    )
    unequal += apart
    _act(run, version, WEIGHTS, unequal, text)
  return {
      'publish/weights_hash': have[0],
      'publish/bytes_moved': identity.bytes_moved(weights, run.engine.weights),
      WEIGHTS: unequal,
  }


def may_apply(run: setup_run.Run, step: int, stats: Mapping[str, Any]) -> bool:
  """Tells whether the update of a batch may be applied.

  Args:
    run: the parts of the run.
    step: number of the iteration, from 1.
    stats: of `publish` and of `Learner.accumulate`.

  Raises:
    MismatchError: it may not, and the run stops on it.
  """
  zeros = ZEROS if run.policy.exact else (WEIGHTS,)
  wrong = {name: '0 expected' for name in zeros if stats[name]}
  for name in COMPARED:
    if run.policy.exact and not stats.get(name, 1):
      wrong[name] = 'above 0 expected'
  for name, value in stats.items():
    if name.startswith(BOUNDED):
      if why := run.metrics.out_of_bounds(name, value):
        wrong.setdefault(name, why)
  if not wrong:
    return True
  name = next(iter(wrong))
  if name in (*zeros, *COMPARED) or run.config.learner.on_mismatch == 'stop':
    # Else the alert comes when the metrics are logged.
    details = ', '.join(f'{n} = {stats[n]:.4g}, {w}' for n, w in wrong.items())
    text = (
        f'iteration {step}: sampler and learner disagree in a batch of'
        f' {stats["mismatch/compared"]:.0f} drawn tokens'
        f' ({journal.path_of(run.workdir, "rl", step)}): {details}'
    )
    _act(run, step, name, stats[name], text)
  if run.config.learner.on_mismatch != 'skip':
    return True
  why = f'{name} = {stats[name]:.4g}, {wrong[name]}'
  run.metrics.note(f'Iteration {step}: the update is skipped; {why}.')
  return False


def _act(run, step: int, name: str, value: float, text: str) -> None:
  """Alerts, and stops the run if that is wanted."""
  run.metrics.alert(name, value, text, step)
  if run.config.learner.on_mismatch == 'stop':
    raise MismatchError(
        f'{text}. Nothing of it was learnt, and the newest checkpoint is the'
        ' state before. Next: `python launch/verify.py mismatch'
        f' --workdir={run.workdir}` shows where the two part; the same command'
        ' resumes, with --config.learner.on_mismatch=skip without batches like'
        ' this one, with =warn whatever happens'
    )
