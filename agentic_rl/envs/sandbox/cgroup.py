"""Bounds the number of processes with a cgroup, for root.

RLIMIT_NPROC does not bind the system's root user, so root needs this (or
another user). Works where the `pids` controller is writable: version 1, or a
delegated version 2. Each command of a sandbox gets a group of its own; groups
of processes that are gone are removed at the next start.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
from typing import Iterator

_ROOT = '/sys/fs/cgroup'
_PREFIX = 'agentic_rl_'
_counter = itertools.count()


class PidsGroups:
  """Groups that are made when needed and used again."""

  def __init__(self, processes: int):
    self._processes = processes
    self._free: list[str] = []
    self._made: list[str] = []
    self._parent = _find_parent()
    if self._parent is not None:
      _sweep(self._parent)
      atexit.register(self.close)

  @property
  def available(self) -> bool:
    """True when a group can be made and limited."""
    if self._parent is None:
      return False
    try:
      with self.group():
        return True
    except OSError:
      return False

  @contextlib.contextmanager
  def group(self) -> Iterator[str]:
    """Lends the file into which a process writes its id to join a group."""
    path = self._free.pop() if self._free else self._make()
    try:
      yield os.path.join(path, 'cgroup.procs')
    finally:
      self._free.append(path)

  def close(self) -> None:
    """Removes the groups."""
    for path in self._made:
      with contextlib.suppress(OSError):
        os.rmdir(path)
    self._made, self._free = [], []

  def _make(self) -> str:
    assert self._parent is not None, 'see available'
    name = f'{_PREFIX}{os.getpid()}_{next(_counter)}'
    path = os.path.join(self._parent, name)
    os.makedirs(path, exist_ok=True)
    self._made.append(path)
    with open(os.path.join(path, 'pids.max'), 'w', encoding='ascii') as f:
      f.write(str(self._processes))
    return path


def _find_parent() -> str | None:
  """Returns the directory in which pids groups can be made."""
  try:
    with open('/proc/self/cgroup', encoding='utf-8') as f:
      lines = [line.strip().split(':', 2) for line in f]
  except OSError:
    return None
  paths = []
  for _, controllers, path in lines:
    if 'pids' in controllers.split(','):
      paths += [f'{_ROOT}/pids{path}', f'{_ROOT}/pids']
    elif not controllers:
      paths += [f'{_ROOT}{path}', _ROOT]
  for path in paths:
    path = path.rstrip('/')
    probe = os.path.join(path, f'{_PREFIX}{os.getpid()}_probe')
    try:
      os.mkdir(probe)
    except OSError:
      continue
    try:
      if os.path.exists(os.path.join(probe, 'pids.max')):
        return path
    finally:
      os.rmdir(probe)
  return None


def _sweep(parent: str) -> None:
  for name in os.listdir(parent):
    if not name.startswith(_PREFIX):
      continue
    pid = name[len(_PREFIX) :].split('_')[0]
    if pid.isdigit() and not os.path.exists(f'/proc/{pid}'):
      with contextlib.suppress(OSError):  # Busy: something still dies in it.
        os.rmdir(os.path.join(parent, name))
