"""Runs generated code in this process: fast, for text that we wrote ourselves.

Generation and the expert's simulator use it. It must never see text that a
policy wrote: that belongs in an environment's sandbox. `TESTS_SCRIPT` is what
the environments run instead; `first_failure` says the same, about a hundred
times faster, and a test holds the two together.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, Mapping, Sequence

# A case is [module, function, arguments, result].
Case = Sequence[Any]

# Python reuses a module's bytecode when size and second of the source agree, as
# they do after a one-token edit: so the script writes none.
TESTS_SCRIPT = """import sys

sys.dont_write_bytecode = True
CASES = [
{cases}
]
for module, name, args, want in CASES:
  place = f'{{module}}.py'
  try:
    function = getattr(__import__(module), name)
    place += f' {{function.__code__.co_firstlineno}}'
    got = repr(function(*args))
  except BaseException as error:
    got = type(error).__name__
  if got != repr(want):
    args = ', '.join(map(repr, args))
    print(f'FAIL {{place}} {{name}}({{args}}) got {{got}} want {{want!r}}')
    sys.exit(1)
print('PASS')
"""


def tests_script(cases: Sequence[Case]) -> str:
  """Returns the text of `tests.py`: prints PASS or the first failure."""
  lines = [f'    {(m, f, tuple(a), w)!r},' for m, f, a, w in cases]
  return TESTS_SCRIPT.format(cases='\n'.join(lines))


@functools.lru_cache(maxsize=4096)
def visible_cases(script: str) -> tuple[Case, ...]:
  """Reads the cases back from a text that `tests_script` made."""
  start = script.index('CASES = [') + len('CASES = ')
  return tuple(ast.literal_eval(script[start : script.index('\n]\n') + 2]))


@functools.lru_cache(maxsize=4096)
def _namespace(text: str) -> dict[str, Any] | str:
  """Executes a module; returns its names, or the name of what it raised."""
  scope: dict[str, Any] = {}
  try:
    exec(compile(text, 'module', 'exec', dont_inherit=True), scope)
  except Exception as error:  # the tests report it, as the script does
    return type(error).__name__
  return scope


def call(files: Mapping[str, str], case: Case) -> tuple[str, str]:
  """Calls the case's function.

  Returns:
    Where it is, `util.py 2`: the line is left out if there is no such function.
    And the repr of what it returns, or the name of the exception that it
    raises.
  """
  module, name, args, _ = case
  place = f'{module}.py'
  text = files.get(place)
  if text is None:
    return place, 'ModuleNotFoundError'
  scope = _namespace(text)
  if isinstance(scope, str):
    return place, scope
  if name not in scope:
    return place, 'AttributeError'
  try:
    place += f' {scope[name].__code__.co_firstlineno}'
    return place, repr(scope[name](*args))
  except Exception as error:  # the tests report it, as the script does
    return place, type(error).__name__


def first_failure(
    files: Mapping[str, str], cases: Sequence[Case]
) -> str | None:
  """Returns the line that describes the first failing case, None if all pass.

  The line is what `tests.py` prints: `FAIL util.py 2 stem(4) got 0 want 8`, 2
  being the line at which the function begins.
  """
  for case in cases:
    place, got = call(files, case)
    _, name, args, want = case
    if got != repr(want):
      shown = ', '.join(map(repr, args))
      return f'FAIL {place} {name}({shown}) got {got} want {want!r}'
  return None
