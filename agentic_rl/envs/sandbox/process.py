"""Runs one bounded command under asyncio, without a thread.

asyncio's own subprocesses wait for undrained pipes after a kill, and start a
thread per process on Python 3.11; here the pipes and the process's descriptor
are watched by the loop, and every wait has an end.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import time
from typing import Any, Callable, Mapping, Sequence

from agentic_rl.envs import protocol
from agentic_rl.envs.sandbox import protocol as sandbox_protocol

_CHUNK_BYTES = 65536
_GRACE_S = 1.0
_REAP_S = 5.0
# What a command leaves running may hold its pipes this much longer.
_LINGER_S = 0.1
_POLL_S = 0.02

# Sets the limits and becomes the command. dash spells RLIMIT_NPROC `-p`, other
# shells `-u`, where `-p` is an error: try both, the probe of the sandbox tells
# whether the limit holds.
_LIMITS = (
    'ulimit -c 0; ulimit -v {memory} && ulimit -t {cpu} && ulimit -f {file}'
    ' && ulimit -n {files} || exit 126; '
    '(ulimit -u {nproc}) 2>/dev/null && ulimit -u {nproc}'
    ' || ulimit -p {nproc}; '
    'echo started >&2; exec "$@"'
)
# The first line on stderr. Nothing of the command ran before it: so without it
# the fault is ours, and with it, whatever follows is the command's doing.
_STARTED = b'started\n'


def with_limits(
    argv: Sequence[str], bounds: sandbox_protocol.Bounds
) -> list[str]:
  """Returns the command that sets the limits of a process, then runs `argv`."""
  script = _LIMITS.format(
      memory=bounds.memory_bytes >> 10,
      cpu=bounds.cpu_s,
      file=bounds.file_bytes >> 9,
      files=bounds.open_files,
      nproc=bounds.processes,
  )
  return ['/bin/sh', '-c', script, 'sh', *argv]


class _Run:
  """A started process and what it has written so far."""

  def __init__(self, process: subprocess.Popen, max_output_bytes: int):
    self.process = process
    self.output = {'stdout': bytearray(), 'stderr': bytearray()}
    self.truncated = False
    self.ended_s: float | None = None
    self.event = asyncio.Event()
    self._max = max_output_bytes
    self._loop = asyncio.get_running_loop()
    self._watched: dict[int, Callable[[], None]] = {}
    self._pidfd = os.pidfd_open(process.pid)
    self._watch(self._pidfd, self._on_exit)
    for name in self.output:
      fd = getattr(process, name).fileno()
      os.set_blocking(fd, False)
      self._watch(fd, functools.partial(self._on_readable, fd, name))

  @property
  def finished(self) -> bool:
    """True when it has ended and its pipes are read to the end."""
    return not self._watched

  def kill(self) -> None:
    """Kills the process and its group."""
    if self.process.returncode is not None:
      return  # Reaped: its number may belong to another process by now.
    try:
      os.killpg(self.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass
    self.process.kill()

  def kill_children(self) -> bool:
    """Kills what the process started, so that it ends by itself."""
    pid = self.process.pid
    try:
      with open(f'/proc/{pid}/task/{pid}/children', encoding='ascii') as f:
        children = [int(word) for word in f.read().split()]
      for child in children:
        os.kill(child, signal.SIGKILL)
    except OSError:
      return False  # Gone just now, or a kernel without that file.
    return bool(children)

  def close(self) -> None:
    """Stops watching."""
    for fd in list(self._watched):
      self._unwatch(fd)
    os.close(self._pidfd)
    for name in self.output:
      getattr(self.process, name).close()

  def _watch(self, fd: int, call: Callable[[], None]) -> None:
    self._watched[fd] = call
    self._loop.add_reader(fd, call)

  def _unwatch(self, fd: int) -> None:
    self._loop.remove_reader(fd)
    del self._watched[fd]
    if not self._watched:
      self.event.set()

  def _on_exit(self) -> None:
    self.process.wait()  # Does not block: the descriptor says it has ended.
    self.ended_s = time.perf_counter()
    self.event.set()
    self._unwatch(self._pidfd)

  def _on_readable(self, fd: int, name: str) -> None:
    try:
      data = os.read(fd, _CHUNK_BYTES)
    except BlockingIOError:
      return
    if not data:
      self._unwatch(fd)
      return
    output = self.output[name]
    room = self._max - len(output)
    output += data[:room]
    if len(data) > room:
      self.truncated = True
      self.event.set()


async def run(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str],
    stdin: bytes = b'',
    timeout_s: float,
    max_output_bytes: int,
    uid: int | None = None,
    pass_fds: Sequence[int] = (),
    namespaced: bool = False,
    reap: Callable[[], None] | None = None,
    overflow: Callable[[], bool] | None = None,
) -> sandbox_protocol.ExecResult:
  """Runs a command made by `with_limits`, within bounds of time and output.

  Args:
    argv: the command.
    cwd: directory to run in.
    env: its whole environment.
    stdin: what it can read, held in an anonymous file: nobody has to write.
    timeout_s: wall seconds.
    max_output_bytes: of each stream; a process that writes more is killed.
    uid: user and group to run as, only for root.
    pass_fds: descriptors that it inherits.
    namespaced: the process is the parent of the first process of a namespace.
      That one is killed instead, since its parent can only reap it, and end,
      when all of the namespace is gone.
    reap: called after the end, to kill what is left.
    overflow: polled; True kills the process as if it wrote too much.

  Raises:
    EnvironmentFailure: the command could not be started or not be killed.
  """
  start = time.perf_counter()
  source = os.memfd_create('stdin')
  try:
    os.write(source, stdin)
    os.lseek(source, 0, os.SEEK_SET)
    drop: dict[str, Any] = {}
    if uid is not None:
      drop = dict(user=uid, group=uid, extra_groups=())
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=dict(env),
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=pass_fds,
        **drop,
    )
  except OSError as error:
    raise protocol.EnvironmentFailure(
        f'can not start {argv[0]}: {error}'
    ) from error
  finally:
    os.close(source)
  try:
    run_ = _Run(process, max_output_bytes)
  except BaseException:
    process.kill()
    raise
  overflowed = False
  deadline = start + timeout_s
  try:
    while not run_.finished and not run_.truncated and not overflowed:
      end = deadline
      if run_.ended_s is not None:
        end = min(deadline, run_.ended_s + _LINGER_S)
      left = end - time.perf_counter()
      if left <= 0:
        break
      run_.event.clear()
      try:
        wait_s = left if overflow is None else min(left, _POLL_S)
        await asyncio.wait_for(run_.event.wait(), wait_s)
      except TimeoutError:
        overflowed = overflow is not None and overflow()
    timed_out = run_.ended_s is None and time.perf_counter() >= deadline
    if not (namespaced and run_.kill_children()):
      run_.kill()
    if reap is not None:
      reap()
    # Never drains a flood: a dead process needs no reader to end.
    if not await _exited(run_, _GRACE_S):
      run_.kill()
      if not await _exited(run_, _REAP_S):
        raise protocol.EnvironmentFailure('a killed command did not end')
  finally:
    run_.kill()
    run_.close()
    # After a cancellation the process is dead but not yet reaped.
    try:
      process.wait(0.5)
    except subprocess.TimeoutExpired:
      pass
  stderr = bytes(run_.output['stderr'])
  if not stderr.startswith(_STARTED):
    text = stderr.decode(errors='replace').strip()
    raise protocol.EnvironmentFailure(
        f'a command did not start: {text or process.returncode}'
    )
  return sandbox_protocol.ExecResult(
      exit_code=process.returncode,
      stdout=bytes(run_.output['stdout']),
      stderr=stderr[len(_STARTED) :],
      timed_out=timed_out,
      truncated=run_.truncated or overflowed,
      wall_s=time.perf_counter() - start,
  )


async def _exited(run_: _Run, timeout_s: float) -> bool:
  end = time.perf_counter() + timeout_s
  while run_.process.poll() is None:
    if time.perf_counter() > end:
      return False
    await asyncio.sleep(0.001)
  return True
