"""The fast in-process runner says what the real test script says."""

import subprocess
import sys

import pytest

from agentic_rl.tasks import execute
from agentic_rl.tasks import generate

_FILES = {
    'util.py': '# 6 // a\ndef stem(a):\n  return 6 // a\n',
    'bad.py': 'def x(:\n',
}


@pytest.mark.parametrize(
    'case, expected',
    [
        (['util', 'stem', [3], 2], None),
        (['util', 'stem', [3], 8], 'FAIL util.py 2 stem(3) got 2 want 8'),
        (
            ['util', 'stem', [0], 8],
            'FAIL util.py 2 stem(0) got ZeroDivisionError want 8',
        ),
        (
            ['util', 'stem', [1, 2], 8],
            'FAIL util.py 2 stem(1, 2) got TypeError want 8',
        ),
        (
            ['util', 'leaf', [4], 8],
            'FAIL util.py leaf(4) got AttributeError want 8',
        ),
        (['bad', 'x', [4], 8], 'FAIL bad.py x(4) got SyntaxError want 8'),
        (
            ['core', 'x', [4], 8],
            'FAIL core.py x(4) got ModuleNotFoundError want 8',
        ),
        (['util', 'stem', [6], True], 'FAIL util.py 2 stem(6) got 1 want True'),
    ],
)
def test_first_failure_is_the_scripts_output(tmp_path, case, expected):
  cases = [['util', 'stem', [1], 6], case]
  assert execute.first_failure(_FILES, cases) == expected
  assert _run(tmp_path, _FILES, execute.tests_script(cases)) == (
      expected or 'PASS',
      1 if expected else 0,
  )


def test_the_script_sees_an_edit_within_the_same_second(tmp_path):
  # Stale bytecode would answer for a file of equal size and time.
  task = generate.generate_task(5, difficulty='tiny')
  script = task.payload['tests']['tests.py']
  first, code = _run(tmp_path, task.payload['files'], script)
  assert first.startswith('FAIL ') and code == 1
  assert _run(tmp_path, generate.fixed_files(task), script) == ('PASS', 0)
  assert not (tmp_path / '__pycache__').exists()


def test_cases_are_read_back_from_the_script():
  cases = [('util', 'stem', (4, 2), 8), ('core', 'fold', (1,), -3)]
  assert execute.visible_cases(execute.tests_script(cases)) == tuple(cases)


def _run(folder, files, script):
  for name, text in {**files, 'tests.py': script}.items():
    (folder / name).write_text(text)
  done = subprocess.run(
      [sys.executable, '-S', 'tests.py'],
      cwd=folder,
      capture_output=True,
      text=True,
      timeout=20,
  )
  assert done.stderr == ''
  return done.stdout.rstrip('\n'), done.returncode
