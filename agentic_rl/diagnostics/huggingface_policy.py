"""A policy in the format of Hugging Face, as `mismatch_run` measures it.

The shape is that of the folder. From the config come the fields that leave the
weights as they are, the sampler and the learner.
"""

from __future__ import annotations

import pathlib
from typing import Any, Sequence

from agentic_rl import setup_run
from agentic_rl.diagnostics import mismatch_run
from agentic_rl.policy import config as policy_config
from agentic_rl.policy import huggingface

# Fields of the policy that do not change what its weights are.
FREE = (
    'pattern', 'window', 'page', 'topk_pages', 'max_context', 'precision',
    'exact', 'impl', 'remat',
)  # fmt: skip


def load(
    config: Any, folder: str | pathlib.Path, words: Sequence[str] = ()
) -> mismatch_run.Policy:
  """Loads a policy; nothing on disk is changed.

  Every layer attends to the whole past, and contexts are at most as long as the
  folder and the config both allow, unless the command line says otherwise.

  Args:
    config: with the overrides of the command line.
    folder: in the format of Hugging Face.
    words: these overrides, as in `--config.policy.page=32`.

  Raises:
    ValueError: a word changes the shape, or the folder holds no such policy.
    OSError: a file can not be read.
  """
  given = {word.partition('=')[0].lstrip('-') for word in words}
  for path in sorted(given):
    _, part, *rest = path.split('.')
    if part == 'tokenizer' or part == 'policy' and rest[0] not in FREE:
      raise ValueError(
          f'{path}: {folder} has its own; allowed are config.policy.'
          f'{{{",".join(FREE)}}}, and what is not of the policy'
      )
  setup_run.check_numbers(config)
  own = {k: config.policy[k] for k in FREE if k in config.policy}
  page = own.get('page', policy_config.PolicyConfig.page)
  fields = huggingface.fields(folder, max(page, 1))
  if 'config.policy.pattern' not in given:
    own.pop('pattern', None)
  if 'config.policy.max_context' not in given:
    longest = own.pop('max_context', fields['max_context'])
    fields['max_context'] = min(fields['max_context'], longest)
  cfg = policy_config.make('small', fields | own)
  weights = huggingface.weights(folder, cfg)
  origin = f'{folder} in the format of Hugging Face'
  return mismatch_run.Policy(
      cfg, weights, config, origin, imported=pathlib.Path(folder)
  )
