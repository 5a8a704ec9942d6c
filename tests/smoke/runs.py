"""Small whole runs through the command line, for the tests of runs."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from agentic_rl import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAIN = ROOT / 'launch' / 'main.py'
LIMIT_S = 900  # of any wait: longer means that something hangs

# Small enough for seconds, long enough that most actions are real calls, and
# each rollout pushes the weights, solved or not.
SMALL = {
    'policy.width': 32,
    'policy.head_width': 8,
    'tasks.fresh.difficulty': 'tiny',
    'tokenizer.corpus_tasks': 100,
    'warm_start.steps': 20,
    'warm_start.sequences': 16,
    'warm_start.checkpoint_every': 5,
    'warm_start.optimizer.learning_rate': 2e-2,
    'warm_start.optimizer.warmup': 2,
    'learner.iterations': 4,
    'credit.action_td.keep_uniform': True,
    'evaluation.tasks': 4,
    'evaluation.greedy_tasks': 4,
}
TASKS = (ROOT / 'configs' / 'swe.py').as_posix() + ':debug'


def arguments(workdir, overrides=None, config=TASKS):
  """Returns the command line of a run; swe.py's is made small."""
  values = {**(SMALL if config == TASKS else {}), **(overrides or {})}
  return [
      sys.executable, str(MAIN), f'--config={config}', f'--workdir={workdir}',
      *(f'--config.{name}={value}' for name, value in values.items()),
  ]  # fmt: skip


def start(workdir, overrides=None, *, config=TASKS, **env):
  """Starts a run in a process group of its own, output in files beside it."""
  workdir = pathlib.Path(workdir)
  log = open(workdir.with_name(workdir.name + '.log'), 'ab')
  try:
    return subprocess.Popen(
        arguments(workdir, overrides, config),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        cwd=workdir.parent,
        start_new_session=True,
    )
  finally:
    log.close()


def output(workdir) -> str:
  """Returns what all runs of `start` in this directory have said."""
  workdir = pathlib.Path(workdir)
  return workdir.with_name(workdir.name + '.log').read_text()


@dataclasses.dataclass
class Done:
  """A run that has ended.

  Attributes:
    code: its exit status.
    text: what it said on standard output.
    errors: what it said on standard error.
    seconds: how long it took.
  """

  code: int
  text: str
  errors: str
  seconds: float


def run(workdir, overrides=None, *, config=TASKS, extra=(), **env) -> Done:
  """Runs to the end; the directory need not exist."""
  began = time.monotonic()
  done = subprocess.run(
      [*arguments(workdir, overrides, config), *extra],
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      env={**os.environ, **env},
      cwd=tempfile.gettempdir(),
      timeout=LIMIT_S,
      check=False,
  )
  seconds = time.monotonic() - began
  return Done(done.returncode, done.stdout, done.stderr, seconds)


def ended(process) -> int:
  """Waits for a process of `start` and returns its exit status."""
  return process.wait(LIMIT_S)


@functools.cache
def base() -> tuple[pathlib.Path, Done]:
  """Runs the small run once per test session; nobody may write there."""
  holder = tempfile.TemporaryDirectory(prefix='agentic_rl_test_')
  _kept.append(holder)
  workdir = pathlib.Path(holder.name) / 'base'
  return workdir, run(workdir)


_kept: list[tempfile.TemporaryDirectory] = []


def summary(workdir) -> dict:
  """Returns the summary of a finished run."""
  return json.loads((pathlib.Path(workdir) / 'summary.json').read_text())


def rows(workdir) -> list[dict]:
  """Returns the rows of the metrics, alerts left out."""
  return metrics.read_rows(workdir)


def steps(workdir) -> dict[str, list[int]]:
  """Returns the recorded steps of each phase, in the order of the file."""
  out: dict[str, list[int]] = {}
  for row in rows(workdir):
    out.setdefault(row['phase'], []).append(row['step'])
  return out


def wait_until(holds, process, what: str):
  """Waits until `holds()`, while the process lives.

  Returns:
    The true value.
  """
  end_s = time.monotonic() + LIMIT_S
  while time.monotonic() < end_s:
    value = holds()
    if value:
      return value
    assert process.poll() is None, f'the run ended before {what}'
    time.sleep(0.01)
  raise AssertionError(f'not in time: {what}')


def descendants(pid: int) -> list[int]:
  """Returns the processes below `pid`."""
  children: dict[int, list[int]] = {}
  for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = stat.read_text().rpartition(')')[2].split()
    except OSError:
      continue
    children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
  found, todo = [], [pid]
  while todo:
    below = children.get(todo.pop(), [])
    found += below
    todo += below
  return found


def workers(process) -> list[int]:
  """Returns the environment workers of a run."""
  return [p for p in descendants(process.pid) if is_worker(p)]


def is_worker(pid: int) -> bool:
  """Tells whether a process is an environment worker and alive."""
  try:
    words = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')
  except OSError:
    return False
  return b'agentic_rl.envs.worker' in words


def kill(process, also=()) -> None:
  """Kills a run at once, and the processes `also` with it."""
  for pid in (process.pid, *also):
    try:
      os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
      pass
  ended(process)


def assert_gone(pids) -> None:
  """Checks that workers end with their run, within seconds."""
  end_s = time.monotonic() + 20
  while (left := [p for p in pids if is_worker(p)]) and (
      time.monotonic() < end_s
  ):
    time.sleep(0.05)
  assert not left, f'orphans: {left}'


def assert_same_result(workdir, expected) -> None:
  """Checks that a run ended as another, however it got there."""
  workdir, expected = pathlib.Path(workdir), pathlib.Path(expected)
  got, want = summary(workdir), summary(expected)
  equal = (
      'params_sha256', 'heldout_solve_before', 'heldout_solve_after',
      'heldout_greedy_before', 'heldout_greedy_after', 'iterations',
      'tokens_sampled', 'compared_logprobs', 'unequal_logprob_bits',
      'route_flips',
  )  # fmt: skip
  assert {k: got[k] for k in equal} == {k: want[k] for k in equal}
  assert steps(workdir) == steps(expected)  # no step twice, none missing
  for mine, other in zip(rows(workdir), rows(expected)):
    for key in ('loss', 'rollout/reward', 'rollout/turns', 'entropy', 'solve'):
      assert mine.get(key) == other.get(key), (key, mine['step'])
  names = [
      sorted(p.name for p in (w / 'trajectories').iterdir())
      for w in (workdir, expected)
  ]
  assert names[0] == names[1]
