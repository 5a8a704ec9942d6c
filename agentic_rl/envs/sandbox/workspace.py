"""A workspace directory whose paths can not lead out of it.

Each part of a path is opened relative to the directory before it, and never
through a symbolic link, so a link planted by an agent leads nowhere, also when
it is swapped in between the check and the use.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile

_DIR = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY | os.O_CLOEXEC


class WorkspaceError(ValueError):
  """A path that a workspace refuses. The message holds no host path."""


def parts_of(path: str) -> list[str]:
  """Splits a relative path, refusing every way out of the workspace."""
  parts = path.split('/')
  if '\0' in path or any(p in ('', '.', '..') for p in parts):
    raise WorkspaceError('bad path')
  return parts


class Workspace:
  """A temporary directory with checked reads and writes."""

  def __init__(self, parent: str | None = None, owner: int | None = None):
    self._owner = owner
    self.root = tempfile.mkdtemp(prefix='agentic_rl_ws_', dir=parent)
    os.chmod(self.root, 0o755)
    if owner is not None:
      os.chown(self.root, owner, owner)

  def read(self, path: str, max_bytes: int) -> bytes:
    """Returns the bytes of a regular file of at most `max_bytes`."""
    *folders, name = parts_of(path)
    folder = self._open_folder(folders, create=False)
    try:
      # O_NONBLOCK: opening a named pipe must not wait for a writer.
      flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
      file = os.open(name, flags, dir_fd=folder)
    except OSError as error:
      raise WorkspaceError('no such file') from error
    finally:
      os.close(folder)
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
      os.close(file)
      raise WorkspaceError('not a regular file')
    with open(file, 'rb') as f:
      if info.st_size > max_bytes:
        raise WorkspaceError('file too large')
      return f.read(max_bytes)

  def write(self, path: str, data: bytes) -> None:
    """Replaces a file, making its folders."""
    *folders, name = parts_of(path)
    folder = self._open_folder(folders, create=True)
    try:
      # Removed first: writing through a hard link would change its target.
      try:
        os.unlink(name, dir_fd=folder)
      except FileNotFoundError:
        pass
      flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
      file = os.open(name, flags | os.O_CLOEXEC, 0o644, dir_fd=folder)
    except OSError as error:
      raise WorkspaceError('can not write there') from error
    finally:
      os.close(folder)
    with open(file, 'wb') as f:
      f.write(data)
      if self._owner is not None:
        os.fchown(file, self._owner, self._owner)

  def size_bytes(self) -> int:
    """Returns the bytes of all files, following no link."""
    total = 0
    for folder, _, names in os.walk(self.root, onerror=None):
      for name in names:
        try:
          total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        except OSError:
          pass
    return total

  def close(self) -> None:
    """Removes the directory."""
    shutil.rmtree(self.root, ignore_errors=True)

  def _open_folder(self, parts: list[str], create: bool) -> int:
    folder = os.open(self.root, _DIR)
    for part in parts:
      try:
        if create:
          try:
            os.mkdir(part, 0o755, dir_fd=folder)
            if self._owner is not None:
              os.chown(part, self._owner, self._owner, dir_fd=folder)
          except FileExistsError:
            pass
        inner = os.open(part, _DIR, dir_fd=folder)
      except OSError as error:
        raise WorkspaceError('no such folder') from error
      finally:
        os.close(folder)
      folder = inner
    return folder


class HasWorkspace:
  """The file half of the sandbox protocol, for backends with a directory."""

  _workspace: Workspace | None = None

  @property
  def workspace(self) -> Workspace:
    """The workspace of a sandbox that was started."""
    if self._workspace is None:
      raise RuntimeError('the sandbox is not started')
    return self._workspace

  async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
    """Reads a regular file of the workspace."""
    return self.workspace.read(path, max_bytes)

  async def write_file(self, path: str, data: bytes) -> None:
    """Writes a file of the workspace."""
    self.workspace.write(path, data)

  async def close(self) -> None:
    """Removes the workspace. May be called twice."""
    if self._workspace is not None:
      self._workspace.close()
      self._workspace = None
