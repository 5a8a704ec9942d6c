"""The whole run, through the command line, as a user sees it."""

import json
import shutil
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing import event_file_loader

from agentic_rl.rollout import journal
from configs import common
from tests.smoke import runs

KEYS = {
    'heldout_solve_before', 'heldout_solve_after', 'heldout_greedy_before',
    'heldout_greedy_after', 'heldout_tasks', 'wall_s', 'iterations',
    'tokens_sampled', 'unequal_logprob_bits', 'route_flips', 'params_sha256',
}  # fmt: skip


def test_everything_is_there():
  workdir, done = runs.base()
  assert done.code == 0, done.errors
  summary = runs.summary(workdir)
  assert KEYS <= summary.keys()
  assert summary['unequal_logprob_bits'] == summary['route_flips'] == 0
  assert summary['compared_logprobs'] == summary['tokens_sampled'] > 0
  assert summary['iterations'] == 4 and summary['heldout_tasks'] == 4
  assert len(summary['params_sha256']) == 64
  assert 0 < summary['wall_s'] < done.seconds
  assert 0.1 < summary['peak_memory_gb'] < 4
  png = (workdir / 'learning_curve.png').read_bytes()
  assert png.startswith(b'\x89PNG') and len(png) > 5000
  assert sorted(p.name for p in (workdir / 'checkpoints' / 'rl').iterdir()) == [
      '2', '3', '4',
  ]  # fmt: skip
  leftovers = [p for p in workdir.rglob('.*') if p.name != '.lock']
  assert not leftovers


def test_metrics_are_complete():
  workdir, _ = runs.base()
  assert runs.steps(workdir) == {
      'warm_start': [10, 20], 'heldout': [0, 4], 'rl': [1, 2, 3, 4],
  }  # fmt: skip
  rl = [row for row in runs.rows(workdir) if row['phase'] == 'rl']
  for row in rl:
    assert row['mismatch/unequal_bits'] == row['router/flips'] == 0
    assert row['mismatch/max_abs_ratio_dev'] == 0
    assert row['status/env_failure'] == 0
  assert any(row['loss'] != 0 for row in rl), 'nothing was learnt'
  # The environments did something: most actions were calls.
  assert all(row['rollout/malformed_share'] < 0.9 for row in rl)


def test_tensorboard_holds_the_same_points():
  workdir, _ = runs.base()
  for phase, steps in runs.steps(workdir).items():
    files = list((workdir / 'tensorboard' / phase).iterdir())
    assert len(files) == 1
    events = event_file_loader.EventFileLoader(str(files[0])).Load()
    assert [e.step for e in events if e.summary.value] == steps


def test_trajectories_are_token_exact():
  workdir, _ = runs.base()
  names = sorted(p.name for p in (workdir / 'trajectories').iterdir())
  assert names == [
      'after-000004.jsonl.gz', 'before-000000.jsonl.gz',
      *(f'rl-{i:06d}.jsonl.gz' for i in (1, 2, 3, 4)),
  ]  # fmt: skip
  count = 0
  for iteration in (1, 2, 3, 4):
    path = journal.path_of(workdir, 'rl', iteration)
    trajectories = list(journal.read(path))
    assert [t.rollout_id for t in trajectories] == list(
        range(8 * (iteration - 1), 8 * iteration)
    )
    for t in trajectories:
      assert t.weight_version == iteration - 1
      count += int(t.sampled.sum())
      # Tokens that were drawn are those of the actions, and no other.
      spans = [range(u.action.start, u.action.end) for u in t.turns]
      assert sorted(i for span in spans for i in span) == [
          i for i, drawn in enumerate(t.sampled) if drawn
      ]
  assert count == runs.summary(workdir)['tokens_sampled']


def test_plain_lines_when_not_a_terminal():
  _, done = runs.base()
  assert '\x1b' not in done.text and '\r' not in done.text
  lines = done.text.splitlines()
  assert '-- warm_start, 20 steps' in lines and '-- rl, 4 steps' in lines
  assert sum(line.startswith('rl ') for line in lines) == 4
  assert 'Held-out tasks solved at temperature 1.0' in done.text
  assert 'Next: tensorboard --logdir=' in done.text
  assert 'Traceback' not in done.errors


def test_the_resolved_config_is_kept():
  workdir, _ = runs.base()
  saved = common.load_resolved(workdir / 'config.json')
  assert saved.policy.width == 32 and saved.warm_start.steps == 20
  assert runs.summary(workdir)['config_hash'] == common.config_hash(saved)


def test_a_finished_run_is_not_done_again():
  workdir, first = runs.base()
  before = {p: p.stat().st_mtime_ns for p in workdir.rglob('*') if p.is_file()}
  again = runs.run(workdir)
  assert again.code == 0 and 'Finished already' in again.text, again.errors
  assert str(workdir) in again.text
  assert again.seconds < max(5, first.seconds / 2)
  after = {p: p.stat().st_mtime_ns for p in workdir.rglob('*') if p.is_file()}
  lock = workdir / '.lock'
  assert before.pop(lock) and after.pop(lock) and before == after


@pytest.mark.parametrize(
    'precision',
    ['float32', pytest.param('bfloat16', marks=pytest.mark.slow)],
)
def test_grpo(tmp_path, precision):
  values = {'credit.name': 'grpo', 'credit.grpo.keep_uniform': True}
  values |= {'policy.precision': precision, 'learner.iterations': 1}
  done = runs.run(tmp_path / 'run', values)
  assert done.code == 0, done.errors
  summary = runs.summary(tmp_path / 'run')
  assert summary['unequal_logprob_bits'] == summary['route_flips'] == 0
  assert summary['compared_logprobs'] > 0


def test_the_config_to_copy_runs(tmp_path):
  config = str(runs.ROOT / 'configs' / 'forkme.py')
  done = runs.run(tmp_path / 'run', config=config)
  assert done.code == 0, done.errors
  assert runs.summary(tmp_path / 'run')['iterations'] == 2


def test_help_is_quick_and_light():
  code = (
      'import json, runpy, sys, time\n'
      'began = time.monotonic()\n'
      'try:\n'
      f'  sys.argv = ["main", "--config={runs.TASKS}", "--help"]\n'
      f'  runpy.run_path({str(runs.MAIN)!r}, run_name="__main__")\n'
      'except SystemExit:\n'
      '  pass\n'
      'heavy = [m for m in ("jax", "flax", "numpy.f2py") if m in sys.modules]\n'
      'print(json.dumps([time.monotonic() - began, heavy]))\n'
  )
  best_s = 99.0
  for _ in range(3):  # the machine may be busy
    done = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        cwd=runs.ROOT,
        check=True,
    )
    seconds, heavy = json.loads(done.stdout.splitlines()[-1])
    assert heavy == [] and '--workdir' in done.stdout
    best_s = min(best_s, seconds)
    if best_s < 3:
      break
  assert best_s < 3


@pytest.mark.slow
def test_a_run_on_a_mesh_goes_on_on_another(tmp_path):
  """Eight of the host's devices; then the last iterations on other axes."""
  work = tmp_path / 'run'
  values = {'mesh': 'data=2,fsdp=2,expert=2', 'checkpoint.keep': 9}
  done = runs.run(work, values)
  assert done.code == 0, done.errors
  summary = runs.summary(work)
  assert summary['unequal_logprob_bits'] == summary['route_flips'] == 0
  assert summary['compared_logprobs'] > 0
  (work / 'summary.json').unlink()
  shutil.rmtree(work / 'checkpoints' / 'rl' / '4')
  shutil.rmtree(work / 'checkpoints' / 'rl' / '3')
  again = runs.run(work, values | {'mesh': 'fsdp=2,context=2'})
  assert again.code == 0, again.errors
  other = runs.summary(work)
  assert other['iterations'] == summary['iterations']
  assert other['unequal_logprob_bits'] == other['route_flips'] == 0


@pytest.mark.parametrize(
    ('mesh', 'said'),
    [
        ('model=2', "'model=2' is not allowed"),
        ('expert=3', 'expert=3 can not cut'),
        ('context=5', 'a multiple of page=16 times'),
    ],
)
def test_a_mesh_that_can_not_be_is_an_error(tmp_path, mesh, said):
  done = runs.run(tmp_path / 'run', {'mesh': mesh})
  assert done.code == 1 and said in done.errors, done.errors
