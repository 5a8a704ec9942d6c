"""The Sandbox protocol: a workspace and bounded commands in it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Mapping, Protocol, Sequence


@dataclasses.dataclass(frozen=True)
class Bounds:
  """What the commands of one sandbox may use.

  Attributes:
    memory_bytes: address space of a process.
    cpu_s: processor seconds of a process.
    file_bytes: size of a file.
    open_files: descriptors of a process.
    processes: processes and threads alive at once.
    tmp_bytes: size of /tmp, held in memory.
    workspace_bytes: size of a writable workspace, checked while commands run.
  """

  memory_bytes: int = 256 << 20
  cpu_s: int = 10
  file_bytes: int = 16 << 20
  open_files: int = 64
  processes: int = 24
  tmp_bytes: int = 16 << 20
  workspace_bytes: int = 64 << 20

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if type(value) is not int or value <= 0:
        raise ValueError(f'{field.name} must be a positive int, got {value!r}')


DEFAULT_BOUNDS = Bounds()


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """How a command ended.

  Attributes:
    exit_code: exit status, or minus the signal that killed it.
    stdout: at most `max_output_bytes`.
    stderr: at most `max_output_bytes`.
    timed_out: True when it was killed at its deadline.
    truncated: True when it was killed because it wrote too much.
    wall_s: seconds from start to end.
  """

  exit_code: int
  stdout: bytes
  stderr: bytes
  timed_out: bool
  truncated: bool
  wall_s: float


class Sandbox(Protocol):
  """A workspace directory; bubblewrap shows it to its commands as /repo.

  Attributes:
    python: command that starts a bare interpreter: no site packages, no
      bytecode written.
  """

  python: ClassVar[tuple[str, ...]]

  @classmethod
  async def check(cls, bounds: Bounds = DEFAULT_BOUNDS) -> None:
    """Raises `EnvironmentFailure`, with the remedy, if commands can't run."""

  async def start(self) -> None:
    """Makes the workspace. Raises `EnvironmentFailure` if it can not run."""

  async def exec(
      self,
      argv: Sequence[str],
      cwd: str = '.',
      env: Mapping[str, str] | None = None,
      timeout_s: float = 10.0,
      max_output_bytes: int = 65536,
      stdin: bytes = b'',
  ) -> ExecResult:
    """Runs a command. Whatever the command does, this returns in time."""

  async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
    """Reads a regular file of the workspace; `WorkspaceError` otherwise."""

  async def write_file(self, path: str, data: bytes) -> None:
    """Writes a file of the workspace; `WorkspaceError` for a bad path."""

  async def close(self) -> None:
    """Removes the workspace. May be called twice."""
