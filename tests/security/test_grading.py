"""Programs that try to get a grade that they did not earn."""

import asyncio
import textwrap

import pytest

from agentic_rl import envs
from tests.envs import samples

# Bodies for util.py. None computes 2 * a.
ATTACKS = {
    'prints PASS and exits': """
        print('PASS', flush=True)
        import os
        os._exit(0)
        """,
    'prints what the driver would report': """
        import os
        for fd in range(3, 64):
          try: os.write(fd, b'[true,8]\\n[true,true]\\n[true,null]\\n')
          except OSError: pass
        os._exit(0)
        """,
    'patches exit': """
        import sys, builtins
        sys.exit = lambda *a: None
        builtins.exit = sys.exit
        def stem(a): return 0
        """,
    'equal to everything': """
        class Any(int):
          def __eq__(self, other): return True
          def __ne__(self, other): return False
          def __repr__(self): return '8'
          __hash__ = None
        def stem(a): return Any()
        """,
    'patches the encoder': """
        import _json, sys, builtins
        main = sys.modules['__main__']
        class Wanted:
          pass
        main.encode = lambda value: 'true'
        builtins.repr = lambda value: '8'
        def stem(a): return Wanted()
        """,
    'looks for the wanted values on the stack': """
        import sys
        def stem(a):
          frame = sys._getframe()
          while frame:
            for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
              if type(value) is list and value and type(value[0]) is list:
                for case in value:
                  if case[2] == [a] and len(case) > 3: return case[3]
            frame = frame.f_back
          return 0
        """,
    'looks for the wanted values in memory': """
        import gc
        def stem(a):
          for value in gc.get_objects():
            if type(value) is list and len(value) == 4:
              if value[:3] == ['util', 'stem', [a]]: return value[3]
          return 0
        """,
    'reads its standard input': """
        import os
        def stem(a):
          os.lseek(0, 0, 0)
          cases = eval(os.read(0, 65536))
          for case in cases:
            if case[2] == [a]: return case[3]
        """,
    'reads /proc': """
        import glob, re
        def stem(a):
          for path in glob.glob('/proc/[0-9]*/*'):
            try: text = open(path, 'rb').read(1 << 20)
            except (OSError, MemoryError): continue
            found = re.search(rb"'stem', \\[%d\\], (\\d+)" % a, text)
            if found: return int(found[1])
          return 0
        """,
    'reads the tests': """
        import re
        def stem(a):
          import glob
          for path in glob.glob('/**/*tests*.py', recursive=True):
            found = re.search(r"\\(\\(%d,\\), (\\d+)\\)" % a, open(path).read())
            if found: return int(found[1])
          return 0
        """,
    'writes the tests': """
        try: open('/repo/tests.py', 'w').write("print('PASS')")
        except OSError: pass
        def stem(a): return 0
        """,
    'leaves a process behind': """
        import os
        if not os.fork():
          os.setsid()
          if os.fork(): os._exit(0)
          import time
          while True: time.sleep(0.01)
        def stem(a): return 0
        """,
    'ends at import': 'raise SystemExit(0)',
    'raises what nobody catches': """
        import threading, os
        def stem(a): raise GeneratorExit
        """,
    'endless loop': 'while True: pass',
    'floods': """
        import os
        while True:
          for fd in (1, 2, 3): os.write(fd, b'[true,8]\\n' * 1000)
        """,
    'reports a deep value': """
        import os
        os.write(3, b'[' * 60000 + b'\\n')
        os._exit(0)
        """,
    'reports a long number': """
        import os
        os.write(3, b'[true,' + b'9' * 60000 + b']\\n')
        os._exit(0)
        """,
    'reports duplicate keys and constants': """
        import os
        os.write(3, b'[true,NaN]\\n[true,Infinity]\\n')
        os._exit(0)
        """,
    'knows the visible cases only': """
        def stem(a): return {4: 8, 5: 10}[a]
        """,
    'guesses': """
        def stem(a): return True
        """,
}


def grade(source, the_task=None, actions=('test', 'submit')):
  """Returns (what `test` said, info of the submission)."""
  # The agent edits line by line; here the file is bad from the start.
  the_task = the_task or samples.task(util=source)
  steps = samples.play(actions, the_task, test_timeout_s=1.0)
  return steps[0][0], steps[-1][4]


@pytest.mark.parametrize('name', ATTACKS)
def test_attacks_score_nothing(name):
  _, info = grade(textwrap.dedent(ATTACKS[name]))
  assert info['status'] == 'submitted'
  assert info['outcome'] == 0.0


def test_an_attack_through_the_tools():
  line = 'import os; print("PASS", flush=True); os._exit(0)'
  steps = samples.play([f'edit util.py 1 {line}', 'test', 'submit'])
  assert steps[1][0] == 'PASS'  # it may fool itself
  assert steps[2][4]['outcome'] == 0.0  # but not the grade


def test_an_honest_program_passes():
  said, info = grade('def stem(a):\n  print("noise")\n  return a * 2\n')
  assert said == 'PASS' and info['outcome'] == 1.0


def test_one_module_can_not_break_out_through_another():
  the_task = samples.task(
      util='import const\ndef stem(a): return const.ONE * a\n',
      **{'const.py': 'class X(int):\n  __mul__ = lambda s, o: s\nONE = X(8)\n'},
  )
  _, info = grade('', the_task)
  assert info['outcome'] == 0.0


def test_hidden_tests_are_not_shown():
  hidden = [['util', 'stem', [123457], 246914]]
  the_task = samples.task(hidden=hidden)
  actions = ['list', 'view util.py', 'view const.py', 'view tests.py', 'test']
  said = '\n'.join(s[0] for s in samples.play(actions, the_task))
  assert '123457' not in said and '246914' not in said


def test_the_answer_never_enters_the_sandbox():
  # Code under test searches all that it can read, its own memory included.
  spy = """
      import glob, os, sys
      def stem(a):
        seen = b''
        for path in [
            '/proc/self/cmdline', '/proc/self/environ',
            *glob.glob('/repo/*'), *glob.glob('/tmp/*'),
        ]:
          seen += open(path, 'rb').read()
        os.lseek(0, 0, 0)
        seen += os.read(0, 1 << 20)
        for line in open('/proc/self/maps').read().splitlines():
          span, mode = line.split()[:2]
          if 'r' not in mode or 'v' in line.split()[-1]: continue
          low, high = (int(x, 16) for x in span.split('-'))
          with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(low)
            seen += memory.read(high - low)
        return [str(a + 794816).encode() in seen, str(a).encode() in seen]
      """
  case = ['util', 'stem', [123457]]
  wanted = samples.task(
      util=textwrap.dedent(spy),
      tests="print('PASS')\n",
      hidden=[[*case, [False, True]], [*case, 918273]],
  )
  _, info = grade('', wanted)
  # The first case holds: it sees the arguments and not the wanted value.
  assert info['passed'] == 1


def test_grading_uses_the_tasks_files_and_the_edits_only():
  async def run():
    env = envs.SweEnvironment()
    await env.reset(0, samples.task())
    await env.step(samples.FIX)
    state = env.snapshot()
    await env.close()
    other = envs.SweEnvironment()
    await other.restore(state)
    return (await other.step('submit'))[4]

  assert asyncio.run(run())['outcome'] == 1.0
