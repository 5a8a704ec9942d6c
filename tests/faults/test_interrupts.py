"""Runs that are stopped, killed or damaged end as if nothing had happened."""

import os
import pathlib
import random
import shutil
import signal
import time

import pytest

from agentic_rl.envs import pool
from tests.smoke import runs


def begin(workdir, **env):
  """Starts the small run; its temporary files are apart from others'."""
  holder = workdir.parent / 'tmp'
  holder.mkdir(exist_ok=True)
  return runs.start(workdir, TMPDIR=str(holder), **env)


def said(workdir, text: str, times: int = 1):
  return lambda: runs.output(workdir).count(text) >= times


def there(path: pathlib.Path, after_s: float = 0.0):
  def holds():
    try:
      return path.stat().st_mtime > after_s
    except FileNotFoundError:
      return False

  return holds


def assert_nothing_left(workdir, workers):
  runs.assert_gone(workers)
  end_s = time.monotonic() + 20
  while (left := list((workdir.parent / 'tmp').glob('agentic_rl_*'))) and (
      time.monotonic() < end_s
  ):
    time.sleep(0.05)
  assert not left


def damage(step: pathlib.Path) -> None:
  """Flips a byte in the middle of the largest file of a checkpoint."""
  files = [p for p in (step / 'tree').rglob('*') if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 0xFF
  largest.write_bytes(data)


@pytest.mark.slow
def test_a_rough_life(tmp_path):
  base, _ = runs.base()
  workdir = tmp_path / 'run'
  rl = workdir / 'checkpoints' / 'rl'

  # Two interrupts abort at once. Without compiled programs the first step is
  # long, so that the second interrupt finds it running.
  cold = str(tmp_path / 'cold')
  process = begin(workdir, JAX_COMPILATION_CACHE_DIR=cold)
  runs.wait_until(said(workdir, '-- warm_start'), process, 'warm start')
  workers = runs.workers(process)
  assert len(workers) == 2
  process.send_signal(signal.SIGINT)
  runs.wait_until(said(workdir, 'Stopping at'), process, 'the answer')
  process.send_signal(signal.SIGINT)
  assert runs.ended(process) == 130
  assert 'aborted' in runs.output(workdir)
  assert_nothing_left(workdir, workers)

  # One interrupt stops cleanly, with a checkpoint.
  process = begin(workdir)
  warm = workdir / 'checkpoints' / 'warm_start'
  runs.wait_until(there(warm / '5'), process, 'a checkpoint')
  workers = runs.workers(process)
  process.send_signal(signal.SIGINT)
  assert runs.ended(process) == 0
  assert f'Stopped. The same command with --workdir={workdir}' in runs.output(
      workdir
  )
  assert_nothing_left(workdir, workers)
  newest = max(int(p.name) for p in warm.iterdir())
  assert newest >= 5

  # A kill while a checkpoint is written; the workers go by themselves.
  process = begin(workdir)
  runs.wait_until(lambda: list(rl.glob('3.*tmp*')), process, 'a write')
  workers = runs.workers(process)
  runs.kill(process)
  assert_nothing_left(workdir, workers)

  # The newest checkpoint is damaged, and a worker dies during rollouts.
  steps = sorted(int(p.name) for p in rl.iterdir() if p.name.isdecimal())
  assert steps[-1] in (2, 3)
  damage(rl / str(steps[-1]))
  now_s = time.time()
  process = begin(workdir)
  path = workdir / 'trajectories' / f'rl-{steps[-1]:06d}.jsonl.gz'
  runs.wait_until(there(path, now_s), process, 'an iteration')
  victim, other = runs.workers(process)
  os.kill(victim, signal.SIGKILL)
  assert runs.ended(process) == 0, runs.output(workdir)
  assert f'CORRUPT CHECKPOINT: step {steps[-1]}' in runs.output(workdir)
  assert (rl / f'corrupt.{steps[-1]}').is_dir()
  assert_nothing_left(workdir, [victim, other])

  assert 'Traceback' not in runs.output(workdir)
  runs.assert_same_result(workdir, base)


def test_no_sound_checkpoint_is_one_clear_error(tmp_path):
  base, _ = runs.base()
  workdir = tmp_path / 'run'
  shutil.copytree(base, workdir)
  (workdir / 'summary.json').unlink()
  for step in (workdir / 'checkpoints' / 'rl').iterdir():
    damage(step)
  done = runs.run(workdir)
  assert done.code == 1 and 'Traceback' not in done.errors
  message = done.errors.strip()
  assert message.startswith('error: every checkpoint in')
  assert 'step 4' in message and 'Remove the folder' in message


@pytest.mark.slow
@pytest.mark.parametrize('number', range(4))
def test_killed_at_random_moments(tmp_path, number):
  base, first = runs.base()
  workdir = tmp_path / 'run'
  rng = random.Random(number)
  for _ in range(6):
    process = begin(workdir)
    end_s = time.monotonic() + rng.uniform(0.2, 0.9) * first.seconds
    while process.poll() is None and time.monotonic() < end_s:
      time.sleep(0.01)
    if process.poll() is None:
      all_at_once = rng.random() < 0.5
      workers = runs.workers(process)
      runs.kill(process, workers if all_at_once else ())
      runs.assert_gone(workers)
  process = begin(workdir)
  assert runs.ended(process) == 0, runs.output(workdir)
  runs.assert_same_result(workdir, base)


@pytest.mark.slow
@pytest.mark.parametrize('phase', ['-- heldout', '-- rl'])
def test_interrupted_later(tmp_path, phase):
  base, _ = runs.base()
  workdir = tmp_path / 'run'
  process = begin(workdir)
  runs.wait_until(said(workdir, phase), process, phase)
  process.send_signal(signal.SIGTERM)
  assert runs.ended(process) == 0, runs.output(workdir)
  assert 'Stopped.' in runs.output(workdir)
  assert not (workdir / 'summary.json').exists()
  assert runs.ended(begin(workdir)) == 0, runs.output(workdir)
  runs.assert_same_result(workdir, base)


@pytest.mark.slow
def test_workers_that_die_again_and_again(tmp_path):
  base, _ = runs.base()
  workdir = tmp_path / 'run'
  process = begin(workdir)
  rng = random.Random(0)
  runs.wait_until(said(workdir, '-- heldout'), process, 'rollouts')
  # An environment outlives so many deaths of its worker; one more is a failure
  # that is counted, and a slow machine could bring all of them to one rollout.
  for _ in range(pool.MAX_REBUILDS):
    time.sleep(rng.uniform(0.2, 0.8))
    workers = runs.workers(process)
    if process.poll() is None and workers:
      os.kill(rng.choice(workers), signal.SIGKILL)
  assert runs.ended(process) == 0, runs.output(workdir)
  runs.assert_same_result(workdir, base)
