"""Runs a task's visible tests and grades a submission against hidden ones.

Both are functions of file contents: each run gets a new workspace with exactly
these files, mounted read-only, in a fresh sandbox. So results are cached by
content, and equal runs that overlap are done once.

Why a grade can not be forged: the sandbox gets the arguments of the hidden
calls and never the values that are wanted. The code under test may print, exit
or patch anything; the comparison happens here, in a process that runs none of
it. A hidden case is `[module, function, args, want]`.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import json
import math
import pathlib
import re
from typing import Any, Awaitable, Callable, Mapping, Sequence

from agentic_rl import types
from agentic_rl.envs import protocol
from agentic_rl.envs import sandbox

_DRIVER = pathlib.Path(__file__).with_name('call_driver.py').read_text('utf-8')
_FRAME = re.compile(r'^ *File "(?:/repo/)?([^"/]+)", line (\d+)', re.M)
_ERROR = re.compile(r'^([A-Za-z_][\w.]*)(?::|$)')
_ADDRESS = re.compile(r'0x[0-9a-fA-F]{4,}')
_MAX_RESULT_CHARS = 160
_RETRY_S = (0.05, 0.5)

Files = Mapping[str, str]


class TestRunner:
  """Runs tests in sandboxes; one per worker, shared by its environments.

  Args:
    backend: class of the sandbox, a value of `SANDBOXES`.
    trusted: passed to the sandbox.
    bounds: limits of a run.
    timeout_s: wall seconds of a run.
    max_output_bytes: output after which a run is stopped.
    max_running: runs at the same time.
    cache_size: results that are kept.
    parent: directory for workspaces.
  """

  __test__ = False  # Not a test, whatever pytest thinks of its name.

  def __init__(
      self,
      backend: type[sandbox.Sandbox],
      *,
      trusted: bool,
      bounds: sandbox.Bounds,
      timeout_s: float,
      max_output_bytes: int,
      max_running: int,
      cache_size: int,
      parent: str | None = None,
  ):
    self._backend = backend
    self._trusted = trusted
    self._bounds = bounds
    self._timeout_s = timeout_s
    self._max_output_bytes = max_output_bytes
    self._running = asyncio.Semaphore(max_running)
    self._cache_size = cache_size
    self._parent = parent
    self._cache: collections.OrderedDict[str, Any] = collections.OrderedDict()
    self._pending: dict[str, asyncio.Task] = {}
    self.counts = {
        'sandbox_retries': 0,
        'sandbox_runs': 0,
        'cache_hits': 0,
        'sandbox_s': 0.0,
    }

  async def check(self) -> None:
    """Raises `EnvironmentFailure` if sandboxes do not work here."""
    await self._backend.check(self._bounds)

  async def test(self, files: Files, tests: Files) -> str:
    """Runs the visible tests: 'PASS', or one line about the first failure."""
    for name in sorted(tests):
      if not name.endswith('.py'):
        continue
      key = types.content_hash(['test', dict(files), dict(tests), name])
      run = functools.partial(self._script, files, tests, name)
      line = await self._cached(key, run)
      if line != 'PASS':
        return line
    return 'PASS'

  async def grade(
      self, files: Files, tests: Files, cases: Sequence[Sequence[Any]]
  ) -> dict[str, Any]:
    """Returns {'outcome': 0.0 or 1.0, 'passed': n, 'cases': n}.

    The outcome is 1 when every hidden case gives exactly the wanted value and
    the visible tests pass.
    """
    key = types.content_hash(['grade', dict(files), list(map(list, cases))])
    passed = await self._cached(key, lambda: self._calls(files, cases))
    solved = passed == len(cases)
    if solved:
      solved = await self.test(files, tests) == 'PASS'
    return dict(outcome=float(solved), passed=passed, cases=len(cases))

  async def _cached(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
    if key in self._cache:
      self._cache.move_to_end(key)
      self.counts['cache_hits'] += 1
      return self._cache[key]
    if key in self._pending:
      self.counts['cache_hits'] += 1
    else:
      # A task of its own: it goes on when the one who asked first is gone.
      task = asyncio.ensure_future(make())
      self._pending[key] = task
      task.add_done_callback(lambda t: self._store(key, t))
    return await asyncio.shield(self._pending[key])

  def _store(self, key: str, task: asyncio.Task) -> None:
    del self._pending[key]
    if task.cancelled() or task.exception() is not None:
      return  # Failures of infrastructure are not results.
    self._cache[key] = task.result()
    while len(self._cache) > self._cache_size:
      self._cache.popitem(last=False)

  def _make(self) -> sandbox.Sandbox:
    make: Callable[..., sandbox.Sandbox] = self._backend
    return make(self._bounds, trusted=self._trusted, parent=self._parent)

  async def _run(
      self, files: Files, arguments: Sequence[str], stdin: bytes = b''
  ) -> sandbox.ExecResult:
    """Runs Python in a new sandbox.

    A failure means that nothing of the code ran, so trying again is safe.
    """
    for wait_s in _RETRY_S:
      try:
        return await self._run_once(files, arguments, stdin)
      except protocol.EnvironmentFailure:
        self.counts['sandbox_retries'] += 1
        await asyncio.sleep(wait_s)
    return await self._run_once(files, arguments, stdin)

  async def _run_once(
      self, files: Files, arguments: Sequence[str], stdin: bytes
  ) -> sandbox.ExecResult:
    async with self._running:
      box = self._make()
      try:
        await box.start()
        for name, text in files.items():
          await box.write_file(name, text.encode())
        result = await box.exec(
            [*box.python, *arguments],
            timeout_s=self._timeout_s,
            max_output_bytes=self._max_output_bytes,
            stdin=stdin,
        )
      except OSError as error:
        raise protocol.EnvironmentFailure(f'sandbox: {error}') from error
      finally:
        await box.close()
    self.counts['sandbox_runs'] += 1
    self.counts['sandbox_s'] += result.wall_s
    return result

  async def _script(self, files: Files, tests: Files, name: str) -> str:
    result = await self._run({**files, **tests}, [name])
    return summarize(result, name)

  async def _calls(self, files: Files, cases: Sequence[Sequence[Any]]) -> int:
    calls = repr([[module, name, args] for module, name, args, _ in cases])
    result = await self._run(files, ['-c', _DRIVER], calls.encode())
    lines = result.stdout.split(b'\n')
    return sum(_returned(line, case[3]) for line, case in zip(lines, cases))


def summarize(result: sandbox.ExecResult, name: str) -> str:
  """Says in one line how a test script ended, without times or addresses."""
  out = result.stdout.decode('utf-8', 'replace')
  lines = [line for line in out.splitlines() if line.strip()]
  for line in lines:
    if line.startswith('FAIL '):
      return _plain(line)
  if result.truncated:
    return 'FAIL output too long'
  if result.timed_out or result.exit_code in (137, 152, -9, -24):
    return 'FAIL timeout'
  if result.exit_code == 0 and lines and lines[-1].strip() == 'PASS':
    return 'PASS'
  error = result.stderr.decode('utf-8', 'replace')
  frames = _FRAME.findall(error)
  last = error.rstrip().rsplit('\n', 1)[-1]
  kind = _ERROR.match(last)
  if frames and kind:
    file, line = frames[-1]
    return _plain(f'FAIL {file} {kind[1].rsplit(".", 1)[-1]} line {line}')
  if result.exit_code == 0:
    return f'FAIL {name} no result'
  return f'FAIL {name} exit {result.exit_code}'


def _plain(line: str) -> str:
  line = _ADDRESS.sub('0x', line)
  line = ''.join(c if c.isprintable() else '?' for c in line)
  return line[:_MAX_RESULT_CHARS].rstrip()


def _returned(line: bytes, want: Any) -> bool:
  """Whether a line of the driver reports exactly the value `want`."""
  try:
    reply = json.loads(line)
  except (ValueError, RecursionError):
    return False
  return (
      type(reply) is list
      and len(reply) == 2
      and reply[0] is True
      and same(reply[1], want)
  )


def same(got: Any, want: Any) -> bool:
  """Compares JSON values type by type: 1, 1.0 and true are three values."""
  if type(got) is not type(want):
    return False
  if isinstance(got, list):
    return len(got) == len(want) and all(map(same, got, want))
  if isinstance(got, dict):
    return got.keys() == want.keys() and all(
        same(got[key], want[key]) for key in got
    )
  if isinstance(got, float) and math.isnan(got):
    return math.isnan(want)
  return got == want
