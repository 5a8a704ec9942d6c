"""The warm start of another work directory, to begin from the same policy.

Runs that are compared should differ in one thing only. This reads the weights
that another run's warm start ended with, and its tokenizer, and checks that
both runs have the same policy and the same held-out tasks. Nothing in the other
directory is changed, and it is not needed once the weights were taken.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Mapping, Sequence

from agentic_rl import checkpoint as checkpoint_lib
from agentic_rl import types
from agentic_rl.policy import config as policy_config
from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.tasks import taskset
from configs import common

_FIELD = 'warm_start.weights'
# How the same weights are computed with, not what they are.
_FREE = ('exact', 'impl', 'remat')


class Source:
  """The finished warm start of another run.

  Attributes:
    workdir: its work directory.
    config: its resolved config.
  """

  def __init__(self, workdir: str | pathlib.Path):
    """Reads the config and looks for the checkpoint.

    Args:
      workdir: of the other run.

    Raises:
      ConfigError: there is no run, or its warm start is not finished.
    """
    self.workdir = pathlib.Path(workdir)
    try:
      self.config = common.load_resolved(self.workdir / 'config.json')
    except common.ConfigError as error:
      raise self._error(f'no work directory of a run: {error}') from None
    self._folder = self.workdir / 'checkpoints' / 'warm_start'
    found = [int(p.name) for p in self._folder.glob('*') if p.name.isdecimal()]
    steps = self.config.warm_start.steps
    if not found or max(found) != steps:
      newest = f'step {max(found)}' if found else 'none'
      raise self._error(
          f'its warm start is not finished: {steps} steps are needed, the'
          f' newest checkpoint is {newest}'
      )

  def tokenizer(self, options: Mapping[str, Any]) -> tokenizer_lib.Tokenizer:
    """Returns its tokenizer.

    Args:
      options: `config.tokenizer` of this run, which must be the same there.

    Raises:
      ConfigError: they differ.
      ValueError: the file is damaged.
    """
    self._same('tokenizer', common.plain(self.config.tokenizer), options)
    return tokenizer_lib.Tokenizer.load(self.workdir / 'tokenizer.json')

  def check(
      self,
      policy: policy_config.PolicyConfig,
      heldout: Sequence[types.Task],
  ) -> None:
    """Checks that the weights fit and that no held-out task was changed.

    Args:
      policy: shape of the policy of this run.
      heldout: tasks of this run's evaluation.

    Raises:
      ConfigError: names the first that differs.
      TaskSetError: the other run's held-out tasks are damaged.
    """
    there = policy_config.make(
        'small',
        {'vocab': policy.vocab, **dict(self.config.policy.items())},
    )
    self._same('policy', _shape(there), _shape(policy))
    theirs = taskset.load(self.workdir / 'heldout').tasks
    for i, (mine, other) in enumerate(zip(heldout, theirs)):
      if mine.task_id != other.task_id:
        raise self._error(
            f'held-out task {i} is {other.task_id} there, {mine.task_id} here;'
            ' the same tasks are needed (config.tasks.fresh)'
        )

  def weights(self, like: Any) -> tuple[int, Any]:
    """Returns the number of warm-start steps and the weights.

    Args:
      like: weights of the same shapes and types.

    Raises:
      CheckpointError: the checkpoint is damaged or holds other arrays.
    """
    step, weights, _ = checkpoint_lib.read_part(self._folder, 'weights', like)
    return step, weights

  def _same(self, part: str, there: Mapping, here: Mapping) -> None:
    for name in sorted(there.keys() | here.keys()):
      if there.get(name) != here.get(name):
        raise self._error(
            f'{part}.{name} is {there.get(name)!r} there,'
            f' {here.get(name)!r} here; the same is needed'
        )

  def _error(self, text: str) -> common.ConfigError:
    return common.ConfigError(f'{_FIELD}={str(self.workdir)!r}: {text}')


def _shape(policy: policy_config.PolicyConfig) -> dict[str, Any]:
  fields = dataclasses.asdict(policy)
  return {k: v for k, v in fields.items() if k not in _FREE}
