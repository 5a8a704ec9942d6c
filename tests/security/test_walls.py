"""What hostile code can reach from inside the sandbox: nothing."""

import asyncio
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from agentic_rl.envs import protocol
from agentic_rl.envs import sandbox
from agentic_rl.envs.sandbox import bubblewrap
from tests.envs import samples

SMALL = sandbox.Bounds(processes=8, tmp_bytes=4 << 20, file_bytes=1 << 20)


def attempt(code, **options):
  """Runs code that prints what it achieved; returns its output lines."""
  result = samples.execute(code, **options)
  return result.stdout.decode().splitlines()


def refused(statement, **options):
  """Whether a statement raises OSError in the sandbox."""
  code = (
      'import os, socket\n'
      'try:\n'
      f'  {statement}\n'
      '  print("done")\n'
      'except OSError:\n'
      '  print("refused")\n'
  )
  lines = attempt(code, **options)
  assert lines in (['done'], ['refused'])
  return lines == ['refused']


def test_no_network():
  server = socket.create_server(('127.0.0.1', 0))
  port = server.getsockname()[1]
  assert refused(f'socket.create_connection(("127.0.0.1", {port}), 1)')
  assert refused('socket.create_connection(("1.1.1.1", 53), 1)')
  assert refused('socket.getaddrinfo("example.com", 80)')
  names = attempt('import socket\nprint(socket.if_nameindex())')
  assert names == ["[(1, 'lo')]"]
  # Nor a socket without a network address.
  path = f'agentic-rl-{os.getpid()}'
  hidden = socket.socket(socket.AF_UNIX)
  hidden.bind('\0' + path)
  hidden.listen()
  assert refused(f'socket.socket(socket.AF_UNIX).connect("\\0{path}")')
  hidden.close()
  server.close()


def test_no_socket_that_leaves_the_network_namespace():
  # Families 40 and 38: a virtual machine's host, the kernel's ciphers.
  for family in (40, 38):
    assert refused(f'socket.socket({family}, socket.SOCK_STREAM)')
    assert refused(f'socket.socketpair({family}, socket.SOCK_STREAM)')
  assert not refused('socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)')
  assert not refused('socket.socketpair()')


def test_no_installed_package():
  lines = attempt(
      'import glob, os, sys\n'
      'for root in ("/usr", "/usr/local", sys.base_prefix):\n'
      '  for folder in glob.glob(root + "/lib/python*/*-packages"):\n'
      '    print(folder, os.listdir(folder))\n'
  )
  assert lines and all(line.endswith(' []') for line in lines)
  assert attempt('import os\nprint(os.path.exists("/usr/src"))') == ['False']


def test_what_the_sandbox_shows_is_known(monkeypatch):
  assert sandbox.exposed('/usr/lib') and sandbox.exposed('/usr/bin/env')
  assert sandbox.exposed(os.path.dirname(os.__file__))
  packages = os.path.join(os.path.dirname(os.__file__), 'site-packages')
  for path in ('/usr/src/app', '/opt', '/tmp', '/usr/libx', packages):
    assert not sandbox.exposed(path), path
  monkeypatch.setattr(bubblewrap, '_PACKAGE', '/usr/lib/agentic_rl')
  with pytest.raises(protocol.EnvironmentFailure, match='read their answers'):
    asyncio.run(sandbox.BubblewrapSandbox.check())


def test_no_secrets_in_the_variables(monkeypatch):
  monkeypatch.setenv('API_TOKEN', 'token-123')
  (line,) = attempt('import os\nprint(sorted(os.environ))')
  assert line == "['HOME', 'LC_CTYPE', 'PATH', 'PWD', 'PYTHONHASHSEED']"
  # Nor in those of any process that it can see.
  lines = attempt(
      'import glob\n'
      'for path in glob.glob("/proc/[0-9]*/environ"):\n'
      '  try: print(open(path, "rb").read())\n'
      '  except OSError: pass\n'
  )
  assert lines and 'token-123' not in ''.join(lines)


def test_no_host_paths():
  with tempfile.NamedTemporaryFile() as file:
    file.write(b'secret')
    file.flush()
    os.chmod(file.name, 0o644)
    assert refused(f'open({file.name!r})')
  here = str(pathlib.Path(__file__).resolve())
  assert refused(f'open({here!r})')
  for path in ('/etc/passwd', '/etc/shadow', '/proc/kcore', '/sys', '/home'):
    assert refused(f'os.listdir({path!r})') and refused(f'open({path!r})')
  (line,) = attempt('import os\nprint(os.listdir("/tmp"), os.listdir("/repo"))')
  assert line == '[] []'


def test_no_other_process_is_seen():
  (line,) = attempt(
      'import os\nprint([p for p in os.listdir("/proc") if p.isdigit()])'
  )
  assert line == "['1']"
  assert refused('os.kill(2, 9)')


@pytest.mark.parametrize(
    'path',
    ['/x', '/usr/x', '/usr/bin/x', '/dev/x', '/dev/shm/x', '/repo/x']
    + ['/root/x', '/etc/x', '/bin/x', '/run/x', '/proc/x'],
)
def test_new_files_are_refused(path):
  assert refused(f'open({path!r}, "w")')


@pytest.mark.parametrize(
    'path',
    ['sys/kernel/core_pattern', 'sys/vm/swappiness', 'sys/kernel/hostname']
    + ['sysrq-trigger', 'irq/default_smp_affinity', 'self/oom_score_adj'],
)
def test_kernel_settings_are_read_only(path):
  # Opened and never written: should this fail, the machine is not changed.
  assert refused(f'os.close(os.open("/proc/{path}", os.O_WRONLY))')


def test_every_mount_is_read_only_but_these():
  lines = attempt(
      'for line in open("/proc/self/mountinfo"):\n'
      '  words = line.split()\n'
      '  if "ro" not in words[5].split(","): print(words[4])\n'
  )
  devices = {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'pts'}
  devices |= {'mqueue', 'console'}
  assert set(lines) <= {'/tmp'} | {f'/dev/{name}' for name in devices}


def test_python_itself_is_read_only():
  assert refused('open(os.__file__, "a")')
  assert refused('os.utime(os.path.dirname(os.__file__))')


def test_the_workspace_is_read_only_for_tests():
  files = {'a.py': b'x = 1\n'}
  for statement in (
      'open("a.py", "w")',
      'os.remove("a.py")',
      'os.mkdir("d")',
      'os.rename("a.py", "b.py")',
      'os.chmod("a.py", 0o777)',
      'os.symlink("/", "link")',
  ):
    assert refused(statement, files=files)
  assert not refused('open("a.py").read()', files=files)


def test_no_privileges():
  lines = attempt(
      'import os\n'
      'status = open("/proc/self/status").read()\n'
      'for line in status.splitlines():\n'
      '  if line.startswith(("CapEff", "CapBnd", "CapPrm", "NoNewPrivs")):\n'
      '    print(line.split()[1])\n'
      'print(os.getuid())\n'
  )
  assert [int(x, 16) for x in lines[:3]] == [0, 0, 0]
  assert lines[3:] == ['1', '1000']
  for statement in ('os.setuid(0)', 'os.chroot("/tmp")', 'os.setgroups([])'):
    assert refused(statement)


@pytest.mark.parametrize(
    'call',
    [
        'unshare(0x10000000)',  # a user namespace of its own
        'unshare(0x00020000)',
        'mount(b"none", b"/tmp", b"tmpfs", 0, None)',
        'umount2(b"/usr", 2)',
        'ptrace(0, 0, None, None)',
        'shmget(0, 4096, 0o1777)',
        'memfd_create(b"x", 0)',
        'setns(0, 0)',
        'syscall(425, 8, None)',  # io_uring_setup
        'syscall(435, None, 0)',  # clone3 without arguments
    ],
)
def test_dangerous_calls_are_refused(call):
  code = f'import ctypes\nprint(ctypes.CDLL(None).{call})'
  assert attempt(code) == ['-1']


def test_a_new_namespace_by_clone_is_refused():
  # CLONE_NEWUSER goes through clone, which the filter has to let pass.
  code = (
      'import ctypes\n'
      'libc = ctypes.CDLL(None)\n'
      'import platform\n'
      'number = {"x86_64": 56, "aarch64": 220}[platform.machine()]\n'
      'pid = libc.syscall(number, 0x10000000 | 17, None, None, None, None)\n'
      'print(pid > 0)\n'
  )
  assert attempt(code)[:1] == ['False']


def processes(marker):
  listing = subprocess.run(['ps', '-eo', 'args'], capture_output=True)
  return listing.stdout.count(marker.encode())


def test_a_fork_bomb_is_bounded():
  marker = f'bomb{os.getpid()}'
  code = (
      f'marker = "{marker}"\n'
      'import os\n'
      'while True:\n'
      '  try: os.fork()\n'
      '  except OSError: pass\n'
  )
  peak = 0

  def count(run):
    nonlocal peak
    while run.poll() is None:
      peak = max(peak, processes(marker))
      time.sleep(0.05)

  program = (
      'from tests.envs import samples\n'
      'from agentic_rl.envs import sandbox\n'
      f'r = samples.execute({code!r}, timeout_s=1.0,'
      ' bounds=sandbox.Bounds(processes=8))\n'
      'assert r.timed_out\n'
  )
  root = pathlib.Path(samples.__file__).parents[2]
  run = subprocess.Popen([sys.executable, '-c', program], cwd=root)
  count(run)
  assert run.returncode == 0
  # Its copies, bubblewrap, the shell before it, and the program above.
  assert 2 <= peak <= 8 + 8 + 3
  assert processes(marker) == 0


def test_threads_are_bounded():
  code = (
      'import threading, time\n'
      'threads = []\n'
      'try:\n'
      '  while len(threads) < 100:\n'
      '    thread = threading.Thread(target=time.sleep, args=(9,), daemon=True)\n'
      '    thread.start()\n'
      '    threads.append(thread)\n'
      'except RuntimeError:\n'
      '  pass\n'
      'print(len(threads), flush=True)\n'
      'import os; os._exit(0)\n'
  )
  assert int(attempt(code, bounds=SMALL)[0]) <= 16


def test_a_memory_bomb_is_bounded():
  bounds = sandbox.Bounds(memory_bytes=128 << 20)
  code = (
      'got = []\n'
      'try:\n'
      '  while len(got) < 1000: got.append(bytearray(1 << 20))\n'
      'except MemoryError:\n'
      '  pass\n'
      'n = len(got)\n'
      'del got\n'
      'print(n)\n'
  )
  assert int(attempt(code, bounds=bounds)[0]) < 128
  assert attempt('try: x = "x" * (1 << 40)\nexcept MemoryError: print(1)') == [
      '1'
  ]


def test_filling_the_disk_is_bounded():
  code = (
      'import os, signal\n'
      'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
      'total = i = 0\n'
      'for folder in ("/tmp", "/dev/shm", "/repo", "/", "/dev", "/run"):\n'
      '  try:\n'
      '    while total < 1 << 28:\n'
      '      with open(f"{folder}/f{i}", "wb", buffering=0) as f:\n'
      '        i += 1\n'
      '        total += f.write(bytes(1 << 20))\n'
      '  except OSError:\n'
      '    pass\n'
      'print(total)\n'
  )
  assert 0 < int(attempt(code, bounds=SMALL)[0]) <= 4 << 20


def test_a_file_is_bounded():
  code = (
      'import signal\n'
      'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
      'f = open("/tmp/f", "wb", buffering=0)\n'
      'print(sum(f.write(bytes(1 << 18)) for _ in range(9)))\n'
  )
  assert attempt(code, bounds=SMALL) == []  # an OSError past one MiB


def test_open_files_are_bounded():
  code = (
      'files = []\n'
      'try:\n'
      '  while len(files) < 999: files.append(open("/dev/null"))\n'
      'except OSError: pass\n'
      'print(len(files))\n'
  )
  assert int(attempt(code)[0]) < 64


def test_processor_time_is_bounded():
  bounds = sandbox.Bounds(cpu_s=1)
  start = time.monotonic()
  result = samples.execute('while 1: pass', bounds=bounds, timeout_s=20)
  assert result.exit_code != 0 and not result.timed_out
  assert time.monotonic() - start < 10


def test_a_writable_workspace_is_bounded():
  bounds = sandbox.Bounds(workspace_bytes=8 << 20)
  code = (
      'import time\n'
      'for i in range(10000):\n'
      '  open(f"/repo/f{i}", "wb").write(bytes(1 << 20))\n'
      '  time.sleep(0.01)\n'
      'print("done")\n'
  )
  result = samples.execute(code, bounds=bounds, writable=True, timeout_s=20)
  assert result.truncated and result.stdout == b''
  assert not refused('open("/repo/a", "w").write("x")', writable=True)


def test_descriptors_do_not_leak_in():
  secret = os.open('/etc/hostname', os.O_RDONLY)
  os.set_inheritable(secret, True)
  (line,) = attempt('import os\nprint(sorted(os.listdir("/proc/self/fd")))')
  os.close(secret)
  # The last one is the listing itself.
  assert line == "['0', '1', '2', '3']"


def test_standard_input_is_a_copy():
  code = 'import os\nos.write(0, b"x")\nprint(os.readlink("/proc/self/fd/0"))'
  assert attempt(code, stdin=b'')[0].startswith('/memfd:stdin')
