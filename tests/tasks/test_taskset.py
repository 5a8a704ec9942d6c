"""Task sets on disk: identity, damage, drift, and the command line."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest

from agentic_rl import types
from agentic_rl.tasks import audit
from agentic_rl.tasks import generate
from agentic_rl.tasks import taskset

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def built():
  return audit.build(12)


@pytest.fixture
def saved(tmp_path, built):
  taskset.save(tmp_path / 'set', built)
  return tmp_path / 'set'


def test_a_saved_set_loads_as_it_was(saved, built):
  loaded = taskset.load(saved)
  assert loaded == built
  assert loaded.version == built.version
  manifest = json.loads((saved / 'manifest.json').read_text())
  assert manifest['count'] == 12
  assert manifest['split'] == 'train'
  assert manifest['generator']['version'] == generate.GENERATOR_VERSION
  assert manifest['parameters']['difficulty']['functions'] == [1, 2]


def test_the_version_depends_on_content_alone(built):
  assert audit.build(12).version == built.version
  assert audit.build(11).version != built.version
  assert audit.build(12, seed=1).version != built.version


def test_text_that_looks_like_lines_survives(tmp_path):
  task = types.Task.create('swe', 'a\u2028b\nc', {'files': {'x': '\x85'}})
  one = taskset.TaskSet((task,), 'train', {})
  taskset.save(tmp_path / 'set', one)
  assert taskset.load(tmp_path / 'set') == one


def test_damage_is_reported_with_file_line_and_expectation(saved):
  file = saved / 'tasks.jsonl'
  good = file.read_text().splitlines(keepends=True)
  third = json.loads(good[2])

  def line(**changes):
    return json.dumps({**third, **changes}) + '\n'

  cases = [
      ([*good[:2], good[2][:50] + '\n', *good[3:]], ':3: expected a JSON'),
      ([*good[:2], '[]\n', *good[3:]], ':3: expected the fields'),
      ([*good[:2], line(prompt='other'), *good[3:]], ':3: expected task_id'),
      ([*good[:2], line(task_id='0' * 16), *good[3:]], ':3: expected task_id'),
      ([*good[:-1], good[-1][:-1]], ':12: expected a newline at the end'),
      (good[:-1], ': expected count 12 .* got 11'),
      ([good[1], good[0], *good[2:]], ': expected version '),
      ([*good[:2], line(meta={}), *good[3:]], ': expected sha256 '),
  ]
  for lines, message in cases:
    file.write_text(''.join(lines))
    with pytest.raises(
        taskset.TaskSetError, match=re.escape(str(file)) + message
    ):
      taskset.load(saved)


def test_a_bad_manifest_is_reported(saved):
  file = saved / 'manifest.json'
  good = json.loads(file.read_text())
  for text, message in [
      ('{', 'expected a JSON object'),
      ('{}', 'expected the fields'),
      (json.dumps({**good, 'schema_version': 9}), 'schema_version 1, got 9'),
  ]:
    file.write_text(text)
    with pytest.raises(taskset.TaskSetError, match=message):
      taskset.load(saved)
  file.unlink()
  with pytest.raises(taskset.TaskSetError, match='manifest.json'):
    taskset.load(saved)


def test_saving_is_all_or_nothing(saved, built, monkeypatch):
  with pytest.raises(FileExistsError, match='exists; allowed: a new path'):
    taskset.save(saved, built)
  other = audit.build(3, seed=50)
  write = taskset._write

  def fail(path, text):
    if path.name == 'manifest.json':
      raise OSError('disk full')
    write(path, text)

  monkeypatch.setattr(taskset, '_write', fail)
  with pytest.raises(OSError, match='disk full'):
    taskset.save(saved, other, overwrite=True)
  assert taskset.load(saved) == built
  monkeypatch.undo()
  taskset.save(saved, other, overwrite=True)
  assert taskset.load(saved) == other
  assert [p.name for p in saved.parent.iterdir()] == ['set']


def test_a_folder_of_something_else_is_never_replaced(tmp_path, built):
  (tmp_path / 'notes.txt').write_text('mine')
  with pytest.raises(FileExistsError):
    taskset.save(tmp_path, built, overwrite=True)
  assert (tmp_path / 'notes.txt').read_text() == 'mine'


def test_a_task_twice_is_refused(tmp_path, built):
  twice = dataclasses.replace(built, tasks=built.tasks + built.tasks[:1])
  with pytest.raises(ValueError, match=f'{built.tasks[0].task_id} is there tw'):
    taskset.save(tmp_path / 'set', twice)


def test_drift_tells_added_removed_changed(built):
  first = built.tasks[0]
  altered = types.Task.create(
      first.env, first.prompt + ' ', first.payload, first.meta
  )
  extra = generate.generate_task(99)
  new = dataclasses.replace(built, tasks=(altered, *built.tasks[1:-1], extra))
  drift = taskset.drift(built, new)
  assert drift.added == (extra.task_id,)
  assert drift.removed == (built.tasks[-1].task_id,)
  assert drift.changed == ((first.task_id, altered.task_id),)
  assert taskset.drift(built, built) == taskset.Drift((), (), ())


def test_check_finds_tasks_that_the_generator_does_not_make(built):
  assert audit.check(built) == {'count': 12, 'problems': {}}
  first = built.tasks[0]
  files = generate.fixed_files(first)
  fixed = types.Task.create(
      first.env, first.prompt, {**first.payload, 'files': files}, first.meta
  )
  wrong = dataclasses.replace(built, tasks=(fixed, *built.tasks[1:]))
  assert list(audit.check(wrong)['problems']) == [fixed.task_id]
  assert generate.verify_task(fixed) == [
      'visible tests pass with the bug',
      'hidden tests pass with the bug',
  ]
  alien = dataclasses.replace(built, generator={'name': 'other'})
  with pytest.raises(ValueError, match="generator is {'name': 'other'}"):
    audit.check(alien)


def test_command_line(tmp_path, capsys):
  def run(*arguments):
    return subprocess.run(
        [sys.executable, str(_ROOT / 'launch' / 'tasks.py'), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )

  build = ['build', '--split=heldout', '--n=5', '--difficulty=tiny']
  done = run(*build, '--out=a', '--json=-')
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['count'] == 5
  done = run(*build, '--out=a')
  assert done.returncode == 2
  assert 'error: a exists' in done.stderr
  done = run('check', 'a', '--json=report.json')
  assert done.returncode == 0
  report = json.loads((tmp_path / 'report.json').read_text())
  assert report == {'count': 5, 'problems': {}}

  sys_path = list(sys.path)
  main = _load_main()
  assert main(['show', str(tmp_path / 'a'), '--n=1']) == 0
  assert 'fix: ' in capsys.readouterr().out
  other = str(tmp_path / 'b')
  assert main(['build', '--n=5', '--out', other]) == 0
  assert main(['diff', str(tmp_path / 'a'), other]) == 0
  assert 'added: 5' in capsys.readouterr().out
  assert main(['build', '--n=0', '--out', other]) == 2
  assert 'n is 0; allowed: at least 1' in capsys.readouterr().err
  # A check that fails: the manifest claims another seed's parameters.
  manifest = tmp_path / 'a' / 'manifest.json'
  manifest.write_text(manifest.read_text().replace('heldout', 'train'))
  assert main(['check', str(tmp_path / 'a')]) == 1
  assert '5 tasks, 5 unsound' in capsys.readouterr().out
  # A report that can not be written is said before the work.
  out = tmp_path / 'c'
  argv = ['build', '--n=3', f'--out={out}', f'--json={tmp_path}/no/x.json']
  assert main(argv) == 2 and not out.exists()
  assert 'no/x.json' in capsys.readouterr().err
  sys.path[:] = sys_path


def _load_main():
  import importlib.util

  spec = importlib.util.spec_from_file_location(
      'launch_tasks', _ROOT / 'launch' / 'tasks.py'
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.main
