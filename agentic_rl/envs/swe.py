"""The software-engineering environment: find and fix a bug in a small repo.

A task's payload:
  files: {name: text}, what the agent may edit
  tests: {name: text}, scripts that print PASS, or FAIL and why, and exit
  hidden_tests: {'cases': [[module, function, args, want], ...]}

Observations are short, because every character is tokens: `grammar.py` has the
tools, and the answers are
  list    names in order, with spaces between
  view    `1 def f(a):`, a line's number, a space, its text
  test    PASS, or the first failure: FAIL util.py 2 stem(4) got 0 want 8
  edit    ok
  submit  nothing: the episode is over and graded
or `ERR why`.

The workspace is a value in this process; a directory exists only while a
command runs in it, made anew and read-only. So the agent has no path by which
to leave it, its code can not change it, and a state is its content.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, Mapping

from agentic_rl import types
from agentic_rl.envs import grammar
from agentic_rl.envs import protocol
from agentic_rl.envs import sandbox
from agentic_rl.envs import swe_tests

_MARK = ' ...'


@dataclasses.dataclass(frozen=True)
class SweOptions:
  """Options of the environment.

  Attributes:
    max_turns: actions in an episode.
    max_obs_chars: longest observation; the rest is cut and marked.
    max_file_chars: longest file that an edit may make.
    max_line_chars: longest line that an edit may make.
    malformed_penalty: subtracted at once for an action that is no call.
    outcome_turn_limit: outcome when all turns are used without `submit`.
    outcome_length: outcome when the context was full.
    outcome_time_limit: outcome when the rollout passed its deadline.
    grade_unsubmitted: grade those three instead, as if submitted.
    sandbox: key of `SANDBOXES`.
    trusted: you trust the code; needed for sandbox 'subprocess'.
    test_timeout_s: wall seconds of one run of tests.
    memory_mb: address space of a process that runs tests.
    max_processes: processes and threads that tests may have.
    max_output_bytes: output after which a run is stopped.
    max_running: runs at the same time in one worker; 0 is one per core.
    cache_size: results of runs that a worker keeps.
    temp_dir: where workspaces are made; None is the system's choice.
  """

  max_turns: int = 10
  max_obs_chars: int = 4000
  max_file_chars: int = 20000
  max_line_chars: int = 400
  malformed_penalty: float = 0.05
  outcome_turn_limit: float = 0.0
  outcome_length: float = 0.0
  outcome_time_limit: float = 0.0
  grade_unsubmitted: bool = False
  sandbox: str = 'bubblewrap'
  trusted: bool = False
  test_timeout_s: float = 2.0
  memory_mb: int = 256
  max_processes: int = 8
  max_output_bytes: int = 65536
  max_running: int = 0
  cache_size: int = 20000
  temp_dir: str | None = None

  def __post_init__(self):
    if self.sandbox not in sandbox.SANDBOXES:
      raise ValueError(
          f'sandbox={self.sandbox!r}; allowed: {", ".join(sandbox.SANDBOXES)}'
      )
    if self.sandbox == 'subprocess' and not self.trusted:
      sandbox.SubprocessSandbox()  # raises, and says why
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      kinds = {'int': (int,), 'float': (int, float), 'bool': (bool,)}
      kind = kinds.get(str(field.type))
      if kind and type(value) not in kind:
        raise ValueError(f'{field.name} must be {field.type}, got {value!r}')
    for name in ('max_turns', 'max_obs_chars', 'max_file_chars', 'memory_mb',
                 'max_line_chars', 'test_timeout_s', 'max_processes',
                 'max_output_bytes', 'cache_size'):  # fmt: skip
      if getattr(self, name) <= 0:
        raise ValueError(f'{name} must be positive')
    if self.malformed_penalty < 0 or self.max_running < 0:
      raise ValueError('malformed_penalty and max_running must be at least 0')

  def runner(self) -> swe_tests.TestRunner:
    """Makes what runs the tests."""
    return swe_tests.TestRunner(
        sandbox.SANDBOXES[self.sandbox],
        trusted=self.trusted,
        bounds=sandbox.Bounds(
            memory_bytes=self.memory_mb << 20,
            cpu_s=int(self.test_timeout_s) + 1,
            processes=self.max_processes,
        ),
        timeout_s=self.test_timeout_s,
        max_output_bytes=self.max_output_bytes,
        max_running=self.max_running or len(os.sched_getaffinity(0)),
        cache_size=self.cache_size,
        parent=self.temp_dir,
    )


@dataclasses.dataclass
class _Episode:
  """Everything that an episode is. JSON values only."""

  task_id: str
  prompt: str
  files: dict[str, str]
  tests: dict[str, str]
  cases: list[Any]
  edits: dict[str, str] = dataclasses.field(default_factory=dict)
  viewed: list[str] = dataclasses.field(default_factory=list)
  last_test: str = ''
  turns: int = 0
  status: str = ''

  @property
  def current(self) -> dict[str, str]:
    return {**self.files, **self.edits}

  def key(self) -> str:
    """Returns the key of the state: contents, what was seen, last result."""
    # An edit that restores a line leads back to the same state.
    edits = {k: v for k, v in self.edits.items() if v != self.files[k]}
    return types.content_hash(
        [self.task_id, edits, sorted(self.viewed), self.last_test, self.status]
    )


class SweEnvironment:
  """One episode at a time; see the module's text."""

  def __init__(self, *, shared: dict[str, Any] | None = None, **options):
    known = {field.name for field in dataclasses.fields(SweOptions)}
    unknown = sorted(set(options) - known)
    if unknown:
      raise ValueError(
          f'unknown option {unknown[0]!r}; allowed: {", ".join(sorted(known))}'
      )
    self._options = SweOptions(**options)
    shared = {} if shared is None else shared
    # Keyed by the options: sharing never mixes results of other limits.
    key = f'swe {self._options}'
    if key not in shared:
      shared[key] = self._options.runner()
    self._runner: swe_tests.TestRunner = shared[key]
    self._episode: _Episode | None = None

  @property
  def counts(self) -> Mapping[str, float]:
    """Counts of the runner, which the worker's environments share."""
    return self._runner.counts

  async def check(self) -> None:
    """Raises `EnvironmentFailure` if no sandbox works here."""
    await self._runner.check()

  async def reset(
      self, seed: int, task: types.Task
  ) -> tuple[str, dict[str, Any]]:
    """Starts an episode. The seed is unused: nothing here is random."""
    del seed
    self._episode = _episode(task)
    return task.prompt, {'state': self._episode.key()}

  async def step(self, action_text: str) -> protocol.Transition:
    """Takes one action: (obs, reward, terminated, truncated, info)."""
    episode = self._running()
    start = time.perf_counter()
    call = grammar.parse(action_text)
    reward, name = 0.0, ''
    if isinstance(call, grammar.Malformed):
      obs = f'ERR {call.reason}'
      reward = -self._options.malformed_penalty
    else:
      name = call.name
      obs = self._clip(await self._act(episode, call))
    episode.turns += 1
    info: dict[str, Any] = {'name': name, 'valid': not obs.startswith('ERR ')}
    terminated, truncated = name == 'submit', False
    if terminated:
      info |= await self._finish(types.Status.SUBMITTED)
    elif episode.turns >= self._options.max_turns:
      truncated = True
      info |= await self._finish(types.Status.TURN_LIMIT)
    info['state'] = episode.key()
    info['env_s'] = time.perf_counter() - start
    return obs, reward, terminated, truncated, info

  async def end(self, status: types.Status) -> dict[str, Any]:
    """Ends an episode that was cut; returns the final info."""
    episode = self._running()
    start = time.perf_counter()
    info = await self._finish(types.Status(status))
    info['state'] = episode.key()
    info['env_s'] = time.perf_counter() - start
    return info

  def snapshot(self) -> dict[str, Any]:
    """Returns the episode as JSON values."""
    if self._episode is None:
      raise RuntimeError('no episode: call reset first')
    return dataclasses.asdict(self._episode)

  async def restore(self, state: Mapping[str, Any]) -> None:
    """Continues the episode of a snapshot."""
    episode = _Episode(**state)
    # Copies, so that a snapshot can be restored again.
    episode.edits, episode.viewed = dict(episode.edits), list(episode.viewed)
    self._episode = episode

  async def close(self) -> None:
    """Frees the episode."""
    self._episode = None

  def _running(self) -> _Episode:
    if self._episode is None:
      raise RuntimeError('no episode: call reset first')
    if self._episode.status:
      raise RuntimeError('the episode has ended: call reset')
    return self._episode

  def _clip(self, obs: str) -> str:
    limit = self._options.max_obs_chars
    return obs if len(obs) <= limit else obs[:limit] + _MARK

  async def _act(self, episode: _Episode, call: grammar.Call) -> str:
    """Carries out a well-formed call."""
    if call.name == 'list':
      return ' '.join(sorted({**episode.files, **episode.tests}))
    if call.name == 'test':
      episode.last_test = await self._runner.test(
          episode.current, episode.tests
      )
      return episode.last_test
    if call.name == 'view':
      return _view(episode, str(call.args[0]))
    if call.name == 'edit':
      file, line, new = call.args
      return self._edit(episode, str(file), int(line), str(new))
    return ''  # submit

  def _edit(self, episode: _Episode, name: str, number: int, new: str) -> str:
    if name in episode.tests:
      return f'ERR {name} is read-only'
    if name not in episode.files:
      return f'ERR no file {grammar.shown(name)}'
    text = episode.current[name]
    lines = text.split('\n')
    count = _line_count(text)
    if not 1 <= number <= count:
      return f'ERR {name} has {count} lines'
    old = lines[number - 1]
    line = old[: len(old) - len(old.lstrip(' \t'))] + new.strip(' \t')
    if len(line) > self._options.max_line_chars:
      return 'ERR line too long'
    lines[number - 1] = line
    edited = '\n'.join(lines)
    if len(edited) > self._options.max_file_chars:
      return 'ERR file too large'
    episode.edits[name] = edited
    return 'ok'

  async def _finish(self, status: types.Status) -> dict[str, Any]:
    """Ends the episode and finds its outcome."""
    episode, options = self._running(), self._options
    episode.status = status.value
    info: dict[str, Any] = {'status': status.value}
    if status is types.Status.ENV_FAILURE:
      return info | {'outcome': None}
    if status is types.Status.SUBMITTED or options.grade_unsubmitted:
      return info | await self._runner.grade(
          episode.current, episode.tests, episode.cases
      )
    return info | {
        'outcome': float(getattr(options, f'outcome_{status.value}'))
    }


def _view(episode: _Episode, name: str) -> str:
  text = {**episode.current, **episode.tests}.get(name)
  if text is None:
    return f'ERR no file {grammar.shown(name)}'
  if name not in episode.viewed:
    episode.viewed.append(name)
  lines = text.split('\n')[: _line_count(text)]
  return '\n'.join(f'{n} {line}' for n, line in enumerate(lines, 1))


def _line_count(text: str) -> int:
  return text.count('\n') + (not text.endswith('\n') and text != '')


def _episode(task: types.Task) -> _Episode:
  """Checks a task's payload; `ValueError` says what is wrong with it."""
  payload = task.payload
  expected = {'files', 'tests', 'hidden_tests'}
  if set(payload) != expected:
    raise ValueError(
        f'task {task.task_id}: payload has keys {sorted(payload)}, expected'
        f' {sorted(expected)}'
    )
  files, tests = dict(payload['files']), dict(payload['tests'])
  cases = payload['hidden_tests'].get('cases')
  for name, text in [*files.items(), *tests.items()]:
    parts = name.split('/')
    if (
        any(part in ('', '.', '..') for part in parts)
        or not name.isprintable()
        or ' ' in name
        or not isinstance(text, str)
    ):
      raise ValueError(f'task {task.task_id}: bad file {name!r}')
  if set(files) & set(tests) or not files:
    raise ValueError(f'task {task.task_id}: files and tests overlap, or none')
  if not cases or any(
      len(case) != 4
      or not isinstance(case[0], str)
      or not isinstance(case[1], str)
      or not isinstance(case[2], (list, tuple))
      for case in cases
  ):
    raise ValueError(
        f'task {task.task_id}: hidden_tests must be {{"cases": [[module,'
        ' function, args, want], ...]} with at least one case'
    )
  return _Episode(task.task_id, task.prompt, files, tests, list(cases))
