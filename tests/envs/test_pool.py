import gc
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from agentic_rl import envs
from agentic_rl import types
from agentic_rl.envs import pool as pool_lib
from tests.envs import samples

GUESS = types.Task.create('forkme', 'Guess.', {'low': 1, 'high': 9})


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
  """Each test leaves no file and no worker behind."""
  # Not under tmp_path, which is closed to the user that sandboxes may run as.
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    monkeypatch.setattr(tempfile, 'tempdir', folder)
    yield
    assert os.listdir(folder) == []
  assert not workers_of(os.getpid())


def workers_of(parent):
  listing = subprocess.run(
      ['ps', '-eo', 'pid,ppid,args'], capture_output=True, text=True
  )
  rows = [line.split(None, 2) for line in listing.stdout.splitlines()[1:]]
  return [
      int(pid)
      for pid, ppid, args in rows
      if int(ppid) == parent and 'agentic_rl.envs.worker' in args
  ]


def take(pool, count=1, timeout_s=20.0):
  """Returns the next `count` results by environment."""
  results = {}
  end = time.monotonic() + timeout_s
  while len(results) < count:
    left = end - time.monotonic()
    assert left > 0, f'{len(results)} of {count} results'
    for result in pool.poll(left):
      assert result.env_id not in results
      results[result.env_id] = result
  return results


def step(pool, env_id, action):
  pool.submit_step(env_id, action)
  return take(pool)[env_id]


def test_an_episode():
  with pool_lib.EnvPool('swe', {'max_turns': 9}, workers=1) as pool:
    pool.submit_reset('a', 0, samples.task())
    result = take(pool)['a']
    assert (result.kind, result.obs, result.error) == ('reset', 'fix it', None)
    assert len(result.info['state']) == 16
    assert step(pool, 'a', 'test').obs == 'FAIL util.py stem(4) got 12 want 8'
    bad = step(pool, 'a', 'nonsense')
    assert (bad.reward, bad.info['valid']) == (-0.05, False)
    assert step(pool, 'a', samples.FIX).obs == 'ok'
    last = step(pool, 'a', 'submit')
    assert last.terminated and not last.truncated and last.kind == 'step'
    assert last.info['outcome'] == 1.0
    with pytest.raises(ValueError, match='has ended'):
      pool.submit_step('a', 'test')
    pool.submit_close('a')
    with pytest.raises(ValueError, match='not open'):
      pool.submit_step('a', 'test')
    stats = pool.stats()
    assert stats['requests'] == stats['results'] == 5
    assert stats['sandbox_runs'] == 3 and stats['failures'] == 0
    assert pool.poll(0.0) == []


def test_an_unknown_option():
  for name in ('swe', 'forkme'):
    with pytest.raises(ValueError, match='max_turn'):
      pool_lib.EnvPool(name, {'max_turn': 3})


def test_one_request_at_a_time():
  with pool_lib.EnvPool('forkme', workers=1) as pool:
    pool.submit_reset(1, 0, GUESS)
    with pytest.raises(ValueError, match='has not answered yet'):
      pool.submit_step(1, 'guess 1')
    take(pool)


def test_a_cut_episode():
  with pool_lib.EnvPool('swe', {'outcome_length': -0.5}, workers=1) as pool:
    pool.submit_reset(1, 0, samples.task())
    take(pool)
    pool.submit_end(1, types.Status.LENGTH)
    result = take(pool)[1]
    assert (result.kind, result.truncated) == ('end', True)
    assert result.info['outcome'] == -0.5
    assert result.info['status'] == 'length'


def test_a_hundred_environments():
  count = 100
  with pool_lib.EnvPool('swe', workers=2) as pool:
    for i in range(count):
      pool.submit_reset(i, 0, samples.task(prompt=f'task {i // 10}'))
    take(pool, count)
    for action in ('test', 'view util.py', samples.FIX, 'test', 'submit'):
      for i in range(count):
        pool.submit_step(i, action)
      results = take(pool, count)
      assert len({r.obs for r in results.values()}) == 1
    assert all(r.info['outcome'] == 1.0 for r in results.values())
    stats = pool.stats()
    assert stats['results'] == count * 6
    assert stats['sandbox_runs'] <= 6  # three different runs, two workers
    for i in range(count):
      pool.submit_close(i)
    assert pool.stats()['envs'] == 0


def test_killed_workers_are_rebuilt_in_the_same_state():
  with pool_lib.EnvPool('swe', workers=2) as pool:
    for i in range(6):
      pool.submit_reset(i, i, samples.task(prompt=f'task {i}'))
    take(pool, 6)
    for i in range(6):
      pool.submit_step(i, samples.FIX)
    before = take(pool, 6)
    for worker in workers_of(os.getpid()):
      os.kill(worker, signal.SIGKILL)
    for i in range(6):
      pool.submit_step(i, 'list')
    after = take(pool, 6)
    for i in range(6):
      assert after[i].error is None
      assert after[i].info['state'] == before[i].info['state']
    # Once more, with the requests under way.
    for i in range(6):
      pool.submit_step(i, 'submit')
    os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
    assert [r.info['outcome'] for r in take(pool, 6).values()] == [1.0] * 6
    stats = pool.stats()
    assert stats['restarts'] == 3
    assert 9 <= stats['rebuilds'] <= 9 + 6
    assert stats['failures'] == 0


def test_the_third_death_is_a_failure():
  with pool_lib.EnvPool('forkme', workers=1) as pool:
    pool.submit_reset(1, 0, GUESS)
    take(pool)
    for death in range(3):
      os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
      result = step(pool, 1, 'guess x')
      assert (result.error is None) == (death < 2)
    assert 'died 3 times' in result.error
    assert result.info == {'status': 'env_failure', 'outcome': None}
    assert result.truncated and result.reward == 0.0
    pool.submit_reset(1, 0, GUESS)
    assert take(pool)[1].error is None


def test_a_replay_that_differs_is_a_failure():
  with pool_lib.EnvPool('forkme', workers=1) as pool:
    pool.submit_reset(1, 0, GUESS)
    take(pool)
    step(pool, 1, 'guess 0')
    pool._envs[1].observations[-1] = 'what it never said'
    os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
    assert 'replay differs at turn 1' in step(pool, 1, 'guess 1').error


def test_a_late_answer_is_a_failure_and_the_rest_goes_on():
  options = {'test_timeout_s': 3.0}
  with pool_lib.EnvPool('swe', options, workers=1, deadline_s=1.0) as pool:
    for i in (1, 2):
      pool.submit_reset(i, 0, samples.task(prompt=str(i)))
    take(pool, 2)
    step(pool, 1, 'edit util.py 3 while a: pass')
    pool.submit_step(1, 'test')
    start = time.monotonic()
    time.sleep(0.1)
    assert step(pool, 2, 'list').error is None
    result = take(pool)[1]
    assert 0.8 < time.monotonic() - start < 2.5
    assert 'no answer within 1 s' in result.error
    assert result.info['status'] == 'env_failure'
    assert step(pool, 2, 'view const.py').obs == '1 ONE = 1'
    assert pool.stats()['late'] == 1 and pool.stats()['restarts'] == 0


def test_a_worker_that_hangs_is_replaced():
  with pool_lib.EnvPool('forkme', workers=1, deadline_s=0.5) as pool:
    for i in (1, 2):
      pool.submit_reset(i, 0, GUESS)
    take(pool, 2)
    os.kill(workers_of(os.getpid())[0], signal.SIGSTOP)
    assert 'no answer' in step(pool, 1, 'guess 1').error
    deadline = time.monotonic() + 10
    while pool.stats()['restarts'] == 0 and time.monotonic() < deadline:
      pool.poll(0.1)
    time.sleep(0.6)  # the new worker starts
    assert step(pool, 2, 'guess x').obs == "ERR no number 'x'"


def test_an_error_in_an_environment_is_a_failure_with_its_traceback():
  with pool_lib.EnvPool('swe', workers=1) as pool:
    pool.submit_reset(1, 0, types.Task.create('swe', '', {'files': {}}))
    result = take(pool)[1]
    assert result.error.startswith('ValueError: task ')
    assert 'Traceback' in result.error


def test_reset_again_drops_the_running_episode():
  with pool_lib.EnvPool('forkme', workers=1) as pool:
    pool.submit_reset(1, 0, GUESS)
    pool.submit_reset(1, 1, GUESS)
    assert take(pool)[1].kind == 'reset'
    assert pool.poll(0.2) == []


def test_an_answer_to_a_closed_episode_is_dropped():
  with pool_lib.EnvPool('forkme', workers=1) as pool:
    pool.submit_reset(1, 0, GUESS)
    take(pool)
    pool.submit_step(1, 'guess 1')
    # It arrives with another's, and is not polled before the episode closes.
    deadline = time.monotonic() + 10
    while not pool._results and time.monotonic() < deadline:
      for key, mask in pool._selector.select(0.1):
        pool._serve(key.data, mask)
    assert len(pool._results) == 1
    pool.submit_reset(1, 1, GUESS)
    assert take(pool)[1].kind == 'reset'


def test_poll_waits_no_longer_than_told():
  with pool_lib.EnvPool('forkme', workers=1) as pool:
    start = time.monotonic()
    assert pool.poll(0.2) == []
    assert 0.19 < time.monotonic() - start < 1.0


def test_large_messages_do_not_block():
  big = types.Task.create('forkme', 'x' * 3_000_000, dict(low=1, high=2))
  with pool_lib.EnvPool('forkme', workers=1) as pool:
    for i in range(4):
      pool.submit_reset(i, 0, big)
    assert all(len(r.obs) == 3_000_000 for r in take(pool, 4).values())


@pytest.mark.parametrize(
    ('name', 'options', 'message'),
    [
        ('nope', {}, "env 'nope'; allowed: swe, forkme"),
        ('swe', {'max_turn': 1}, "unknown option 'max_turn'"),
        ('swe', {'sandbox': 'subprocess'}, 'trusted=True'),
    ],
)
def test_bad_arguments(name, options, message):
  with pytest.raises(ValueError, match=message):
    pool_lib.EnvPool(name, options)
  gc.collect()


def test_no_bubblewrap_is_one_clear_error(monkeypatch, tmp_path):
  fake = tmp_path / 'bwrap'
  fake.write_text('#!/bin/sh\nexit 1\n')
  fake.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
  with pytest.raises(envs.EnvironmentFailure, match='user namespaces'):
    pool_lib.EnvPool('swe', workers=2)


def test_workers_end_with_a_killed_parent():
  root = pathlib.Path(envs.__file__).parents[2]
  code = (
      'import os, time\n'
      'from agentic_rl.envs import pool\n'
      'from tests.envs import samples\n'
      'p = pool.EnvPool("swe", {"test_timeout_s": 30.0}, workers=2)\n'
      'for i in (1, 2):\n'
      '  p.submit_reset(i, 0, samples.task(prompt=str(i)))\n'
      'while p.stats()["results"] < 2: p.poll(1)\n'
      'for i in (1, 2): p.submit_step(i, "edit util.py 3 while a: pass")\n'
      'while p.stats()["results"] < 4: p.poll(1)\n'
      'for i in (1, 2): p.submit_step(i, "test")\n'
      'p.poll(0.3)\n'
      'print("ready", flush=True)\n'
      'time.sleep(60)\n'
  )
  parent = subprocess.Popen(
      [sys.executable, '-c', code],
      cwd=root,
      env=os.environ | {'TMPDIR': tempfile.gettempdir()},
      stdout=subprocess.PIPE,
  )
  assert parent.stdout.readline() == b'ready\n'
  workers = workers_of(parent.pid)
  assert len(workers) == 2
  parent.kill()
  parent.wait()
  parent.stdout.close()
  deadline = time.monotonic() + 5
  while time.monotonic() < deadline:
    if not any(os.path.exists(f'/proc/{pid}') for pid in workers):
      if not os.listdir(tempfile.gettempdir()):
        return
    time.sleep(0.05)
  pytest.fail('workers or files are left')


def test_workers_never_import_jax():
  with pool_lib.EnvPool('swe', workers=1) as pool:
    pool.submit_reset(1, 0, samples.task())
    take(pool)
    step(pool, 1, 'test')
    (worker,) = workers_of(os.getpid())
    maps = pathlib.Path(f'/proc/{worker}/maps').read_text('utf-8')
    assert 'numpy' in maps and 'jax' not in maps
