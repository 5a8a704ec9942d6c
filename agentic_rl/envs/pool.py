"""EnvPool: many environments in worker processes, for a synchronous caller.

The collector submits actions and polls results; nothing here starts a thread,
and every wait has an end. What can break is a result with an error, never a
reward: a request past its deadline, an environment that raises, a worker that
dies. A dead worker is started again, and its environments are rebuilt by
replaying their actions, whose observations must be the same as before.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Hashable, Mapping

from agentic_rl import envs
from agentic_rl import types
from agentic_rl.envs import protocol
from agentic_rl.envs import wire

MAX_REBUILDS = 2
_MAX_FALSE_STARTS = 3
_START_S = 60.0
_CLOSE_S = 3.0
_MAX_HOMES = 100_000


@dataclasses.dataclass(frozen=True)
class EnvResult:
  """An answer.

  Attributes:
    env_id: the environment's id.
    kind: 'reset', 'step' or 'end'.
    obs: the observation; '' for 'end' and errors.
    reward: earned at once; the outcome is in `info`.
    terminated: True when the agent ended the episode.
    truncated: True when something else ended it.
    info: see `protocol.py`.
    error: None, or what broke; then `info['status']` is 'env_failure'.
  """

  env_id: Hashable
  kind: str
  obs: str
  reward: float
  terminated: bool
  truncated: bool
  info: dict[str, Any]
  error: str | None = None


@dataclasses.dataclass
class _Request:
  """A request that is not answered yet."""

  id: int
  env_id: Hashable
  kind: str
  arguments: list[Any]
  sent_s: float
  deadline_s: float


@dataclasses.dataclass
class _Journal:
  """All that is needed to rebuild an environment."""

  number: int
  worker: _Worker
  seed: int
  task: dict[str, Any]
  actions: list[str] = dataclasses.field(default_factory=list)
  observations: list[str] = dataclasses.field(default_factory=list)
  rebuilds: int = 0
  request: _Request | None = None
  replay: int | None = None  # id of the request that rebuilds it
  over: bool = False
  failed: str | None = None


@dataclasses.dataclass(eq=False)
class _Worker:
  """A worker process and what is on its way to it."""

  process: subprocess.Popen
  socket: socket.socket
  folder: str
  out: bytearray = dataclasses.field(default_factory=bytearray)
  unpacker: wire.Unpacker = dataclasses.field(default_factory=wire.Unpacker)
  ready: bool = False
  heard_s: float = 0.0
  false_starts: int = 0
  load: int = 0
  fatal: str = ''
  counts: dict[str, float] = dataclasses.field(default_factory=dict)


class EnvPool:
  """Environments of one kind in worker processes.

  Args:
    name: key of `ENVIRONMENTS`.
    options: keyword options of the environment.
    workers: number of processes.
    deadline_s: seconds after which a request is an error; longer than the runs
      that may wait for each other in one worker.

  Raises:
    ValueError: unknown name or option, or a bad value.
    EnvironmentFailure: workers do not start; the message says why.
  """

  def __init__(
      self,
      name: str,
      options: Mapping[str, Any] | None = None,
      workers: int = 2,
      deadline_s: float = 240.0,
  ):
    if name not in envs.ENVIRONMENTS:
      raise ValueError(f'env {name!r}; allowed: {", ".join(envs.ENVIRONMENTS)}')
    if workers < 1 or deadline_s <= 0:
      raise ValueError('workers and deadline_s must be positive')
    keywords = dict(options or {})
    try:
      envs.ENVIRONMENTS[name](**keywords)  # raises for bad ones
    except TypeError as error:
      raise ValueError(f'env.{name}: {error}') from error
    self._hello = {'env': name, 'options': keywords}
    self._deadline_s = deadline_s
    self._selector = selectors.DefaultSelector()
    self._root = tempfile.mkdtemp(prefix='agentic_rl_envs_')
    os.chmod(self._root, 0o711)  # sandboxes may run as another user
    self._envs: dict[Hashable, _Journal] = {}
    self._requests: dict[int, _Request] = {}  # in the order of their deadlines
    self._homes: dict[str, int] = {}
    self._results: collections.deque[EnvResult] = collections.deque()
    self._next = 0
    self._counts: dict[str, float] = dict.fromkeys(
        ('requests', 'results', 'failures', 'late', 'restarts', 'rebuilds'), 0
    ) | {'env_s': 0.0}
    self._retired: collections.Counter[str] = collections.Counter()
    self._closed = False
    self._workers: list[_Worker] = []
    try:
      self._workers += [self._spawn(index) for index in range(workers)]
      self._wait_until_ready()
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> EnvPool:
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def submit_reset(self, env_id: Hashable, seed: int, task: types.Task) -> None:
    """Starts an episode; a running one of that id is dropped."""
    if env_id in self._envs:
      self.submit_close(env_id)
    fields = dict(
        task_id=task.task_id,
        env=task.env,
        prompt=task.prompt,
        payload=dict(task.payload),
    )
    worker = self._home(task.task_id)
    worker.load += 1
    self._next += 1
    journal = _Journal(self._next, worker, seed, fields)
    self._envs[env_id] = journal
    self._submit(env_id, 'reset', [seed, fields])

  def submit_step(self, env_id: Hashable, action_text: str) -> None:
    """Sends an action."""
    self._submit(env_id, 'step', [action_text])

  def submit_end(self, env_id: Hashable, status: types.Status) -> None:
    """Ends an episode that was cut; the result's info has the outcome."""
    self._submit(env_id, 'end', [types.Status(status).value])

  def submit_close(self, env_id: Hashable) -> None:
    """Forgets an environment, whatever it is doing. There is no result."""
    journal = self._envs.pop(env_id, None)
    if journal is None:
      return
    if journal.request is not None:
      del self._requests[journal.request.id]
    # An answer that nobody polled yet is not for the id's next episode.
    self._results = collections.deque(
        result for result in self._results if result.env_id != env_id
    )
    journal.worker.load -= 1
    self._send(journal.worker, [0, journal.number, 'close'])

  def poll(self, timeout_s: float) -> list[EnvResult]:
    """Returns what has arrived, after waiting at most `timeout_s` for it."""
    end_s = time.monotonic() + timeout_s
    wait_s = 0.0
    while True:
      for key, mask in self._selector.select(wait_s):
        self._serve(key.data, mask)
      now = time.monotonic()
      self._expire(now)
      if self._results or now >= end_s:
        results = list(self._results)
        self._results.clear()
        return results
      wait_s = end_s - now
      if self._requests:
        first = next(iter(self._requests.values()))
        wait_s = max(min(wait_s, first.deadline_s - now), 0.0)

  def stats(self) -> dict[str, float]:
    """Returns counts since the start, those of the workers included."""
    total: collections.Counter[str] = collections.Counter()
    total.update(self._counts)
    total.update(self._retired)
    for worker in self._workers:
      total.update(worker.counts)
    total.update(envs=len(self._envs), in_flight=len(self._requests))
    return {name: float(value) for name, value in total.items()}

  def close(self) -> None:
    """Ends the workers and removes their files. May be called twice."""
    if self._closed:
      return
    self._closed = True
    for worker in self._workers:
      self._selector.unregister(worker.socket)
      worker.socket.close()
    end_s = time.monotonic() + _CLOSE_S
    for worker in self._workers:
      try:
        worker.process.wait(max(end_s - time.monotonic(), 0.01))
      except subprocess.TimeoutExpired:
        worker.process.kill()
        worker.process.wait()
    self._selector.close()
    shutil.rmtree(self._root, ignore_errors=True)

  # ---------------------------------------------------------------- requests

  def _home(self, task_id: str) -> _Worker:
    """Returns the task's worker: one task, one worker, one result cache."""
    if task_id not in self._homes:
      if len(self._homes) >= _MAX_HOMES:
        self._homes.pop(next(iter(self._homes)))
      loads = [worker.load for worker in self._workers]
      self._homes[task_id] = loads.index(min(loads))
    return self._workers[self._homes[task_id]]

  def _submit(self, env_id: Hashable, kind: str, arguments: list[Any]) -> None:
    if self._closed:
      raise RuntimeError('the pool is closed')
    journal = self._envs.get(env_id)
    if journal is None:
      raise ValueError(
          f'environment {env_id!r} is not open: submit_reset first'
      )
    if journal.request is not None:
      raise ValueError(f'environment {env_id!r} has not answered yet')
    if journal.over:
      raise ValueError(f'the episode of environment {env_id!r} has ended')
    now = time.monotonic()
    self._next += 1
    self._counts['requests'] += 1
    request = _Request(
        self._next, env_id, kind, arguments, now, now + self._deadline_s
    )
    journal.request = request
    self._requests[request.id] = request
    if journal.failed is not None:
      self._fail(env_id, journal, journal.failed)
      return
    self._send(journal.worker, [request.id, journal.number, kind, *arguments])

  def _send(self, worker: _Worker, message: Any) -> None:
    waiting = bool(worker.out)
    worker.out += wire.pack(message)
    if not waiting:
      self._flush(worker)

  def _flush(self, worker: _Worker) -> None:
    try:
      sent = worker.socket.send(worker.out)
      del worker.out[:sent]
    except BlockingIOError:
      pass
    except OSError:
      return  # It has died; the end of its stream will tell.
    events = selectors.EVENT_READ
    if worker.out:
      events |= selectors.EVENT_WRITE
    if self._selector.get_key(worker.socket).events != events:
      self._selector.modify(worker.socket, events, worker)

  # ----------------------------------------------------------------- answers

  def _serve(self, worker: _Worker, mask: int) -> None:
    if mask & selectors.EVENT_WRITE:
      self._flush(worker)
    if not mask & selectors.EVENT_READ:
      return
    try:
      data = worker.socket.recv(1 << 20)
    except BlockingIOError:
      return
    except OSError:
      data = b''
    if not data:
      self._restart(worker)
      return
    worker.heard_s = time.monotonic()
    for message in worker.unpacker.feed(data):
      if 'ready' in message:
        worker.ready, worker.false_starts = True, 0
      elif 'fatal' in message:
        worker.fatal = message['fatal']
      else:
        worker.counts = message['counts']
        for reply in message['results']:
          self._take(reply)

  def _take(self, reply: dict[str, Any]) -> None:
    request = self._requests.get(reply['id'])
    if request is None:
      self._take_replay(reply)
      return
    journal = self._envs[request.env_id]
    if 'error' in reply:
      self._fail(
          request.env_id, journal, reply['error'] + '\n' + reply['trace']
      )
      return
    del self._requests[request.id]
    journal.request = None
    result = EnvResult(
        request.env_id,
        request.kind,
        reply.get('obs', ''),
        reply.get('reward', 0.0),
        reply.get('terminated', False),
        reply.get('truncated', False),
        reply['info'],
    )
    if request.kind == 'step':
      journal.actions.append(request.arguments[0])
    journal.observations.append(result.obs)
    journal.over = result.terminated or result.truncated
    self._counts['results'] += 1
    self._counts['env_s'] += result.info.get('env_s', 0.0)
    self._results.append(result)

  def _take_replay(self, reply: dict[str, Any]) -> None:
    """Handles the answer to a rebuild; late answers end here too."""
    if 'error' not in reply:
      return
    for env_id, journal in self._envs.items():
      if journal.replay == reply['id']:
        journal.failed = reply['error']
        if journal.request is not None:
          self._fail(env_id, journal, reply['error'])
        return

  def _fail(self, env_id: Hashable, journal: _Journal, error: str) -> None:
    """Answers the open request of an environment with an error."""
    request = journal.request
    assert request is not None
    del self._requests[request.id]
    journal.request = None
    journal.over = True
    self._counts['failures'] += 1
    info = {'status': types.Status.ENV_FAILURE.value, 'outcome': None}
    self._results.append(
        EnvResult(env_id, request.kind, '', 0.0, False, True, info, error)
    )

  def _expire(self, now: float) -> None:
    """Fails the requests whose deadline has passed."""
    late = []
    for request in self._requests.values():
      if request.deadline_s > now:
        break
      late.append(request)
    stuck = set()
    for request in late:
      journal = self._envs[request.env_id]
      self._counts['late'] += 1
      self._fail(
          request.env_id, journal, f'no answer within {self._deadline_s:g} s'
      )
      self._send(journal.worker, [0, journal.number, 'close'])
      if journal.worker.heard_s <= request.sent_s:
        stuck.add(journal.worker)
    for worker in stuck:
      # Silent all that time: it hangs. The end of its stream restarts it.
      worker.process.kill()

  # ----------------------------------------------------------------- workers

  def _spawn(self, index: int) -> _Worker:
    ours, theirs = socket.socketpair()
    folder = tempfile.mkdtemp(prefix=f'{index}_', dir=self._root)
    os.chmod(folder, 0o711)
    package = str(pathlib.Path(envs.__file__).parents[2])
    path = os.pathsep.join(
        filter(None, [package, os.environ.get('PYTHONPATH')])
    )
    single = dict(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1')
    # A session of its own: an interrupt at the terminal is for the main
    # process, whose end closes the socket.
    process = subprocess.Popen(
        [sys.executable, '-P', '-m', 'agentic_rl.envs.worker',
         str(theirs.fileno()), folder],
        env=os.environ | single | {'PYTHONPATH': path},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )  # fmt: skip
    theirs.close()
    ours.setblocking(False)
    worker = _Worker(process, ours, folder, heard_s=time.monotonic())
    self._selector.register(ours, selectors.EVENT_READ, worker)
    self._send(worker, self._hello)
    return worker

  def _wait_until_ready(self) -> None:
    end_s = time.monotonic() + _START_S
    while not all(worker.ready for worker in self._workers):
      if time.monotonic() > end_s:
        raise protocol.EnvironmentFailure('environment workers do not start')
      for key, mask in self._selector.select(0.1):
        self._serve(key.data, mask)

  def _restart(self, worker: _Worker) -> None:
    """Replaces a dead worker and rebuilds its environments."""
    worker.process.kill()
    worker.process.wait()
    self._selector.unregister(worker.socket)
    worker.socket.close()
    shutil.rmtree(worker.folder, ignore_errors=True)
    index = self._workers.index(worker)
    false_starts = 0 if worker.ready else worker.false_starts + 1
    if worker.fatal or false_starts >= _MAX_FALSE_STARTS:
      self._workers.remove(worker)
      raise protocol.EnvironmentFailure(
          worker.fatal
          or f'a worker died {false_starts} times before it was ready, exit'
          f' status {worker.process.returncode}'
      )
    self._counts['restarts'] += 1
    self._retired.update(worker.counts)
    fresh = self._spawn(index)
    fresh.false_starts, fresh.load = false_starts, worker.load
    self._workers[index] = fresh
    for env_id, journal in list(self._envs.items()):
      if journal.worker is worker:
        journal.worker = fresh
        if not journal.over:
          self._rebuild(env_id, journal)

  def _rebuild(self, env_id: Hashable, journal: _Journal) -> None:
    """Replays an environment in its new worker, then repeats its request."""
    if journal.rebuilds >= MAX_REBUILDS:
      journal.failed = f'its worker died {journal.rebuilds + 1} times'
    if journal.failed is not None:
      if journal.request is not None:
        self._fail(env_id, journal, journal.failed)
      return
    journal.rebuilds += 1
    self._counts['rebuilds'] += 1
    if journal.observations:
      self._next += 1
      journal.replay = self._next
      self._send(
          journal.worker,
          [journal.replay, journal.number, 'replay', journal.seed]
          + [journal.task, journal.actions, journal.observations],
      )
    request = journal.request
    if request is not None:
      now = time.monotonic()
      request.sent_s, request.deadline_s = now, now + self._deadline_s
      # Kept in the order of deadlines.
      self._requests[request.id] = self._requests.pop(request.id)
      self._send(
          journal.worker,
          [request.id, journal.number, request.kind, *request.arguments],
      )
