"""Runs commands as plain processes: only for code that you trust.

The limits of `Bounds` hold as far as the system's resource limits go. The
network, the files of the machine and other processes are NOT closed off.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from typing import ClassVar, Mapping, Sequence

from agentic_rl.envs.sandbox import process
from agentic_rl.envs.sandbox import protocol
from agentic_rl.envs.sandbox import workspace

_MARK = 'AGENTIC_RL_SANDBOX'


class SubprocessSandbox(workspace.HasWorkspace):
  """The sandbox protocol without a sandbox."""

  def __init__(
      self,
      bounds: protocol.Bounds = protocol.DEFAULT_BOUNDS,
      *,
      trusted: bool = False,
      writable: bool = False,
      parent: str | None = None,
  ):
    del writable  # Nothing can make a workspace read-only here.
    if not trusted:
      raise ValueError(
          "sandbox 'subprocess' runs agents' code with your own rights: set"
          " trusted=True if you trust that code, or use 'bubblewrap'"
      )
    self._bounds = bounds
    self._parent = parent
    self._mark = secrets.token_hex(8)

  python: ClassVar[tuple[str, ...]] = (
      os.path.realpath(sys.executable),
      '-s',
      '-S',
      '-B',
  )

  @classmethod
  async def check(
      cls, bounds: protocol.Bounds = protocol.DEFAULT_BOUNDS
  ) -> None:
    """Does nothing: a process can always be started."""
    del bounds

  async def start(self) -> None:
    """Makes the workspace."""
    self._workspace = workspace.Workspace(self._parent)

  async def exec(
      self,
      argv: Sequence[str],
      cwd: str = '.',
      env: Mapping[str, str] | None = None,
      timeout_s: float = 10.0,
      max_output_bytes: int = 65536,
      stdin: bytes = b'',
  ) -> protocol.ExecResult:
    """Runs a command as an ordinary process."""
    root = self.workspace.root
    if cwd != '.':
      root = os.path.join(root, *workspace.parts_of(cwd))
    variables = {
        'PATH': '/usr/bin:/bin',
        'HOME': root,
        'PYTHONHASHSEED': '0',
        **(env or {}),
        _MARK: self._mark,
    }
    return await process.run(
        process.with_limits(argv, self._bounds),
        cwd=root,
        env=variables,
        stdin=stdin,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
        reap=self._reap,
    )

  def _reap(self) -> None:
    """Kills children that left the process group, known by their variables."""
    mark = f'{_MARK}={self._mark}'.encode()
    for pid in os.listdir('/proc'):
      if not pid.isdigit():
        continue
      try:
        with open(f'/proc/{pid}/environ', 'rb') as f:
          marked = mark in f.read().split(b'\0')
        if marked:
          os.kill(int(pid), signal.SIGKILL)
      except OSError:
        pass
