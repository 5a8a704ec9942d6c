"""A process that hosts many environments: python -m agentic_rl.envs.worker.

Started by `pool.py`, which it talks to over an inherited socket. It never
imports JAX. Each request is an asyncio task; requests of one environment run
in order, those of different environments overlap. It ends when the pool closes
the socket or its parent dies, and removes its temporary files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
import sys
import tempfile
import traceback
from typing import Any

from agentic_rl import envs
from agentic_rl import types
from agentic_rl.envs import wire

_PARENT_CHECK_S = 1.0


@dataclasses.dataclass
class _Host:
  """An environment, and the lock that keeps its requests in order."""

  env: Any
  lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
  tasks: set[asyncio.Task] = dataclasses.field(default_factory=set)


class Worker:
  """Serves the requests of one pool."""

  def __init__(self, writer: asyncio.StreamWriter):
    self._writer = writer
    self._hosts: dict[Any, _Host] = {}
    self._shared: dict[str, Any] = {}
    self._replies: list[dict[str, Any]] = []
    self._make = lambda: None
    self._counts: Any = {}

  async def start(self, env: str, options: dict[str, Any]) -> None:
    """Checks that environments of this kind can run here."""
    kind = envs.ENVIRONMENTS[env]
    self._make = lambda: kind(shared=self._shared, **options)
    first = self._make()
    await first.check()
    # An environment may publish counts; they are shared, so any one will do.
    self._counts = getattr(first, 'counts', {})
    self._writer.write(wire.pack({'ready': True}))

  def take(self, message: list[Any]) -> None:
    """Starts work on [request_id, env_id, operation, *arguments]."""
    request, env_id, operation, *arguments = message
    if operation == 'close':
      host = self._hosts.pop(env_id, None)
      if host is not None:
        for task in host.tasks:
          task.cancel()
        asyncio.ensure_future(host.env.close())
      return
    if env_id not in self._hosts:
      self._hosts[env_id] = _Host(self._make())
    host = self._hosts[env_id]
    task = asyncio.ensure_future(
        self._answer(host, request, operation, arguments)
    )
    host.tasks.add(task)
    task.add_done_callback(host.tasks.discard)

  async def _answer(self, host, request, operation, arguments) -> None:
    reply: dict[str, Any] = {'id': request}
    try:
      async with host.lock:
        reply |= await getattr(self, '_' + operation)(host.env, *arguments)
    except Exception as error:  # Every fault becomes a result of its request.
      reply['error'] = f'{type(error).__name__}: {error}'
      reply['trace'] = traceback.format_exc(limit=-6)
    if not self._replies:
      # All that end in this turn of the loop leave as one message.
      asyncio.get_running_loop().call_soon(self._flush)
    self._replies.append(reply)

  def _flush(self) -> None:
    message = {'results': self._replies, 'counts': dict(self._counts)}
    self._writer.write(wire.pack(message))
    self._replies = []

  async def _reset(self, env, seed: int, task: dict[str, Any]):
    obs, info = await env.reset(seed, types.Task(**task))
    return {'obs': obs, 'info': info}

  async def _step(self, env, action: str):
    obs, reward, terminated, truncated, info = await env.step(action)
    return dict(
        obs=obs,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        info=info,
    )

  async def _end(self, env, status: str):
    info = await env.end(types.Status(status))
    return {'info': info, 'truncated': True}

  async def _replay(self, env, seed, task, actions, observations):
    """Rebuilds an episode and compares it with what was seen before."""
    got = [(await env.reset(seed, types.Task(**task)))[0]]
    for action in actions:
      got.append((await env.step(action))[0])
    for turn, (new, old) in enumerate(zip(got, observations, strict=True)):
      if new != old:
        raise RuntimeError(
            f'replay differs at turn {turn}: {new[:80]!r}, was {old[:80]!r}'
        )
    return {}


async def _leave_with_parent(parent: int) -> None:
  """Ends the process when the pool's process is gone."""
  while os.getppid() == parent:
    await asyncio.sleep(_PARENT_CHECK_S)
  raise EOFError


async def _serve(fd: int) -> None:
  reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))

  async def receive():
    header = await reader.readexactly(wire.LENGTH_BYTES)
    data = await reader.readexactly(wire.length(header))
    return next(wire.Unpacker().feed(header + data))

  async def serve():
    worker = Worker(writer)
    first = await receive()
    try:
      await worker.start(first['env'], first['options'])
    except Exception as error:
      writer.write(wire.pack({'fatal': f'{type(error).__name__}: {error}'}))
      await writer.drain()
      return
    while True:
      worker.take(await receive())

  watch = asyncio.ensure_future(_leave_with_parent(os.getppid()))
  work = asyncio.ensure_future(serve())
  done, _ = await asyncio.wait(
      [watch, work], return_when=asyncio.FIRST_COMPLETED
  )
  for task in done:
    # The end of the stream is the normal way to end.
    error = task.exception()
    if error is not None and not isinstance(error, (EOFError, OSError)):
      raise error


def main() -> None:
  """Runs a worker until its pool is gone."""
  fd, folder = int(sys.argv[1]), sys.argv[2]
  tempfile.tempdir = folder
  try:
    asyncio.run(_serve(fd))
  finally:
    shutil.rmtree(folder, ignore_errors=True)
    try:
      os.rmdir(os.path.dirname(folder))  # The last worker takes the root along.
    except OSError:
      pass


if __name__ == '__main__':
  main()
