"""Task sets on disk, versioned by content.

A set is a directory of two files: `tasks.jsonl`, one task a line, and
`manifest.json`, which says what made it and holds the hashes that `load`
verifies. `drift` compares two versions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any, Mapping

from agentic_rl import types

SCHEMA_VERSION = 1
MANIFEST = 'manifest.json'
TASKS = 'tasks.jsonl'
_FIELDS = ('task_id', 'env', 'prompt', 'payload', 'meta')


class TaskSetError(ValueError):
  """A task set on disk is damaged; the text names file, line and cause."""


@dataclasses.dataclass(frozen=True)
class TaskSet:
  """Tasks and where they come from.

  Attributes:
    tasks: in order, with distinct ids.
    split: the split that they belong to.
    generator: name and version of what made them.
    parameters: its arguments, JSON values.
  """

  tasks: tuple[types.Task, ...]
  split: str
  generator: Mapping[str, Any]
  parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def version(self) -> str:
    """Hash of all ids in order: the same content has the same version."""
    return types.content_hash([t.task_id for t in self.tasks])


@dataclasses.dataclass(frozen=True)
class Drift:
  """What differs between two versions of a set.

  Attributes:
    added: ids only in the new version.
    removed: ids only in the old version.
    changed: (old id, new id) of tasks from the same split and seed.
  """

  added: tuple[str, ...]
  removed: tuple[str, ...]
  changed: tuple[tuple[str, str], ...]

  def to_json(self) -> dict[str, Any]:
    """Returns the fields as JSON values."""
    return {
        'added': list(self.added),
        'removed': list(self.removed),
        'changed': [list(c) for c in self.changed],
    }


def save(
    path: str | os.PathLike[str], tasks: TaskSet, overwrite: bool = False
) -> None:
  """Writes a set; the directory appears complete or not at all.

  Args:
    path: the directory to make.
    tasks: the set.
    overwrite: replace a set that is there.

  Raises:
    FileExistsError: `path` exists and `overwrite` is False, or it holds
      something else than a task set.
    ValueError: two tasks are the same.
  """
  path = pathlib.Path(path)
  if path.exists():
    if not overwrite or not (path / MANIFEST).is_file():
      raise FileExistsError(
          f'{path} exists; allowed: a new path, or overwrite of a task set'
      )
  ids = [t.task_id for t in tasks.tasks]
  if len(set(ids)) != len(ids):
    twice = next(i for n, i in enumerate(ids) if i in ids[:n])
    raise ValueError(f'task {twice} is there twice; allowed: distinct tasks')
  lines = ''.join(_line(t) + '\n' for t in tasks.tasks)
  manifest = {
      'schema_version': SCHEMA_VERSION,
      'generator': dict(tasks.generator),
      'parameters': dict(tasks.parameters),
      'split': tasks.split,
      'count': len(ids),
      'version': tasks.version,
      'sha256': hashlib.sha256(lines.encode()).hexdigest(),
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir()
  _write(partial / TASKS, lines)
  _write(partial / MANIFEST, json.dumps(manifest, indent=2) + '\n')
  if path.exists():
    old = path.with_name(f'.{path.name}.{os.getpid()}.old')
    os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old)
  else:
    os.rename(partial, path)


def load(path: str | os.PathLike[str]) -> TaskSet:
  """Reads a set and verifies every hash.

  Raises:
    TaskSetError: a file is missing or damaged; the text names it, the line and
      what was expected.
  """
  path = pathlib.Path(path)
  manifest = _read_manifest(path / MANIFEST)
  file = path / TASKS
  try:
    text = file.read_bytes().decode('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise TaskSetError(f'{file}: expected UTF-8 text, got {error}') from None
  # Not splitlines: JSON strings may hold U+2028.
  lines = text.split('\n')
  if lines.pop() != '':
    raise TaskSetError(
        f'{file}:{len(lines) + 1}: expected a newline at the end; the line is '
        'cut short'
    )
  tasks = [_read_task(file, n, line) for n, line in enumerate(lines, 1)]
  found = TaskSet(
      tuple(tasks),
      manifest['split'],
      manifest['generator'],
      manifest['parameters'],
  )
  checks = {
      'count': len(tasks),
      'version': found.version,
      'sha256': hashlib.sha256(text.encode()).hexdigest(),
  }
  for name, value in checks.items():
    if manifest[name] != value:
      raise TaskSetError(
          f'{file}: expected {name} {manifest[name]!r} as in {MANIFEST}, got '
          f'{value!r}'
      )
  return found


def drift(old: TaskSet, new: TaskSet) -> Drift:
  """Compares two versions: what was added, removed, changed.

  A task changed if the same split and seed now make another id; tasks without
  a seed in their meta are only added or removed.
  """
  old_ids = {t.task_id: t for t in old.tasks}
  new_ids = {t.task_id: t for t in new.tasks}
  removed = {i: t for i, t in old_ids.items() if i not in new_ids}
  added = {i: t for i, t in new_ids.items() if i not in old_ids}
  origins = {_origin(t): i for i, t in removed.items() if _origin(t)}
  changed = tuple(
      (origins[_origin(t)], i)
      for i, t in added.items()
      if _origin(t) in origins
  )
  gone, come = {a for a, _ in changed}, {b for _, b in changed}
  return Drift(
      tuple(i for i in added if i not in come),
      tuple(i for i in removed if i not in gone),
      changed,
  )


def _origin(task: types.Task) -> tuple | None:
  if 'seed' not in task.meta:
    return None
  return (task.env, task.meta.get('split'), task.meta['seed'])


def _line(task: types.Task) -> str:
  values = {name: getattr(task, name) for name in _FIELDS}
  return json.dumps(values, sort_keys=True, separators=(',', ':'))


def _write(path: pathlib.Path, text: str) -> None:
  with open(path, 'w', encoding='utf-8', newline='\n') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def _read_manifest(file: pathlib.Path) -> dict[str, Any]:
  expected = (
      'schema_version',
      'generator',
      'parameters',
      'split',
      'count',
      'version',
      'sha256',
  )
  try:
    manifest = json.loads(file.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise TaskSetError(f'{file}: expected a JSON object, got {error}') from None
  if not isinstance(manifest, dict) or set(manifest) != set(expected):
    raise TaskSetError(f'{file}: expected the fields {list(expected)}')
  if manifest['schema_version'] != SCHEMA_VERSION:
    raise TaskSetError(
        f'{file}: expected schema_version {SCHEMA_VERSION}, got '
        f'{manifest["schema_version"]!r}'
    )
  return manifest


def _read_task(file: pathlib.Path, number: int, line: str) -> types.Task:
  try:
    values = json.loads(line)
  except ValueError as error:
    raise TaskSetError(
        f'{file}:{number}: expected a JSON object, got {error}'
    ) from None
  if not isinstance(values, dict) or set(values) != set(_FIELDS):
    raise TaskSetError(f'{file}:{number}: expected the fields {list(_FIELDS)}')
  task = types.Task.create(
      values['env'], values['prompt'], values['payload'], values['meta']
  )
  if task.task_id != values['task_id']:
    raise TaskSetError(
        f'{file}:{number}: expected task_id {task.task_id!r}, the hash of env, '
        f'prompt and payload, got {values["task_id"]!r}'
    )
  return task
