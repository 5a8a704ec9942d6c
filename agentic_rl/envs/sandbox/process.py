"""Runs one bounded command under asyncio, without a thread.

asyncio's own subprocesses wait for undrained pipes after a kill, and start a
thread per process on Python 3.11; here the pipes and the process's descriptor
are watched by the loop, and every wait has an end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from typing import Callable, Mapping, Sequence

from agentic_rl.envs import protocol
from agentic_rl.envs.sandbox import protocol as sandbox_protocol

_CHUNK_BYTES = 65536
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
    'exec "$@"'
)


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
      self._watch(fd, lambda fd=fd, name=name: self._on_readable(fd, name))

  @property
  def finished(self) -> bool:
    return not self._watched

  def kill(self) -> None:
    try:
      os.killpg(self.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass
    self.process.kill()

  def close(self) -> None:
    for fd in list(self._watched):
      self._unwatch(fd)
    os.close(self._pidfd)
    self.process.stdout.close()
    self.process.stderr.close()

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
    reap: Callable[[], None] | None = None,
    overflow: Callable[[], bool] | None = None,
) -> sandbox_protocol.ExecResult:
  """Runs a command until it ends, its deadline, or too much output.

  Args:
    argv: the command.
    cwd: directory to run in.
    env: its whole environment.
    stdin: what it can read, held in an anonymous file: nobody has to write.
    timeout_s: wall seconds.
    max_output_bytes: of each stream; a process that writes more is killed.
    uid: user and group to run as, only for root.
    pass_fds: descriptors that it inherits.
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
    drop = {} if uid is None else dict(user=uid, group=uid, extra_groups=())
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
    run_.kill()
    if reap is not None:
      reap()
    try:
      # Never drains a flood: a dead process needs no reader to end.
      await asyncio.wait_for(_exited(run_), _REAP_S)
    except TimeoutError as error:
      raise protocol.EnvironmentFailure(
          'a killed command did not end'
      ) from error
  finally:
    run_.kill()
    run_.close()
    # After a cancellation the process is dead but not yet reaped.
    try:
      process.wait(0.5)
    except subprocess.TimeoutExpired:
      pass
  return sandbox_protocol.ExecResult(
      exit_code=process.returncode,
      stdout=bytes(run_.output['stdout']),
      stderr=bytes(run_.output['stderr']),
      timed_out=timed_out,
      truncated=run_.truncated or overflowed,
      wall_s=time.perf_counter() - start,
  )


async def _exited(run_: _Run) -> None:
  while run_.process.poll() is None:
    await asyncio.sleep(0.001)
