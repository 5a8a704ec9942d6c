"""Builds a generated task set and checks one: what `launch/tasks.py` calls.

A check executes code in this process, so it first proves that the code is the
generator's own: the same seed must give the same id.
"""

from __future__ import annotations

from typing import Any

from agentic_rl import types
from agentic_rl.tasks import generate
from agentic_rl.tasks import taskset

_NAME = 'agentic_rl.tasks.generate'


def build(
    count: int,
    split: str = 'train',
    difficulty: str = 'default',
    *,
    seed: int = 0,
    holdout_fraction: float = 0.1,
    holdout_templates: int = 0,
) -> taskset.TaskSet:
  """Generates a set; the parameters that made it are part of it."""
  if count < 1:
    raise ValueError(f'n is {count!r}; allowed: at least 1')
  options: dict[str, Any] = {
      'holdout_fraction': holdout_fraction,
      'holdout_templates': holdout_templates,
  }
  dial = generate.Difficulty.parse(difficulty)
  tasks = generate.generate_tasks(count, split, dial, seed=seed, **options)
  return taskset.TaskSet(
      tuple(tasks),
      split,
      {'name': _NAME, 'version': generate.GENERATOR_VERSION},
      {'seed': seed, 'difficulty': dial.to_json(), **options},
  )


def check(tasks: taskset.TaskSet) -> dict[str, Any]:
  """Verifies that bugs fail, fixes pass, and that tasks are of their split.

  Returns:
    `count`, and `problems`: for each unsound task what is wrong.
  """
  made_by = {'name': _NAME, 'version': generate.GENERATOR_VERSION}
  if dict(tasks.generator) != made_by:
    raise ValueError(
        f'generator is {dict(tasks.generator)!r}; allowed: {made_by!r}'
    )
  problems = {}
  for task in tasks.tasks:
    wrong = _problems(task, tasks)
    if wrong:
      problems[task.task_id] = wrong
  return {'count': len(tasks.tasks), 'problems': problems}


def describe(task: types.Task) -> str:
  """Returns a task as text: the files and the solution."""
  lines = [f'== {task.task_id} {task.env}: {task.prompt}']
  for name, text in sorted(task.payload.get('files', {}).items()):
    lines += [f'-- {name}', text.rstrip('\n')]
  for bug in task.meta.get('bugs', ()):
    lines.append(f'fix: {bug["file"]}:{bug["line"]} {bug["new"]}')
  return '\n'.join(lines)


def _problems(task: types.Task, tasks: taskset.TaskSet) -> list[str]:
  parameters = tasks.parameters
  options = {
      k: parameters[k] for k in ('holdout_fraction', 'holdout_templates')
  }
  try:
    again = generate.generate_task(
        task.meta['seed'], tasks.split, parameters['difficulty'], **options
    )
  except (KeyError, TypeError) as error:
    return [f'its parameters are incomplete: {error!r}']
  if again != task:
    return [f'seed {task.meta["seed"]} of the split gives {again.task_id}']
  return generate.verify_task(task)
