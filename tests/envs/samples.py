"""A small task, and ways to run environments in tests."""

import asyncio

from agentic_rl import envs
from agentic_rl import types
from agentic_rl.envs import sandbox

UTIL = """# stem(a): a doubled
def stem(a):
  b = a * 3
  return b
"""
TESTS = """import sys
import util
for args, want in [((4,), 8), ((5,), 10)]:
  got = util.stem(*args)
  if got != want:
    print(f'FAIL util.py stem({args[0]}) got {got} want {want}')
    sys.exit(1)
print('PASS')
"""
FIX = 'edit util.py 3 b = a * 2'
HIDDEN = (['util', 'stem', [4], 8], ['util', 'stem', [7], 14])


def task(util=UTIL, tests=TESTS, hidden=HIDDEN, prompt='fix it', **files):
  """Returns a task whose bug is in line 3 of util.py."""
  return types.Task.create(
      'swe',
      prompt,
      {
          'files': {'util.py': util, 'const.py': 'ONE = 1\n'} | files,
          'tests': {'tests.py': tests},
          'hidden_tests': {'cases': [list(case) for case in hidden]},
      },
  )


def play(actions, the_task=None, shared=None, **options):
  """Plays actions; returns the transitions."""

  async def run():
    env = envs.SweEnvironment(shared=shared, **options)
    await env.reset(0, the_task or task())
    out = [await env.step(action) for action in actions]
    await env.close()
    return out

  return asyncio.run(run())


def execute(code, *, bounds=sandbox.DEFAULT_BOUNDS, files=(), **options):
  """Runs Python code in a bubblewrap sandbox; returns its ExecResult."""
  writable = options.pop('writable', False)

  async def run():
    box = sandbox.BubblewrapSandbox(bounds, writable=writable)
    await box.start()
    try:
      for name, data in dict(files).items():
        await box.write_file(name, data)
      argv = [*box.python, '-c', code]
      return await box.exec(argv, **{'timeout_s': 5.0} | options)
    finally:
      await box.close()

  return asyncio.run(run())
