"""A scripted, imperfect expert and a fast simulator of its world.

The expert makes the traces of the supervised warm start. Its noise is in its
decisions (where it edits, what it writes, whether it checks), never in its
knowledge; it recovers from what a test shows it. `ExpertPolicy` acts on
observations, so it can drive a real environment; `simulate` drives it through
`MiniRepo`, which gives the observations that the 'swe' environment gives.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from typing import Iterable, Iterator, Mapping

from agentic_rl import types
from agentic_rl.tasks import execute
from agentic_rl.tasks import generate
from agentic_rl.tasks import templates

_TOKEN = re.compile(r'\w+|//|[<>=!]=|[^\w\s]|\s+')


@dataclasses.dataclass(frozen=True)
class Noise:
  """Probabilities of the expert's decisions, all in [0, 1].

  Attributes:
    list_first: asks for the list of files, which the prompt already gives.
    test_first: runs the tests before it looks at a file; otherwise it opens a
      file at random.
    right_line: edits the line with the bug, not another of the function.
    right_fix: writes the right text, not a one-token variant.
    verify: runs the tests after its edits, before it submits.
  """

  list_first: float = 0.02
  test_first: float = 0.7
  right_line: float = 0.75
  right_fix: float = 0.75
  verify: float = 0.6

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if not 0 <= value <= 1:
        raise ValueError(f'{name} is {value!r}; allowed: 0 to 1')


class ExpertPolicy:
  """Chooses the next action from the last observation.

  It reads `task.meta['bugs']`, so it works on generated tasks only.
  """

  def __init__(
      self,
      task: types.Task,
      rng: random.Random,
      noise: Noise = Noise(),
      turns: int = 10,
  ):
    """Prepares an episode.

    Args:
      task: a generated task.
      rng: source of every decision.
      noise: how often decisions are right.
      turns: turn limit of the environment; the last turn submits.
    """
    if 'bugs' not in task.meta:
      raise ValueError(
          f'task {task.task_id} of {task.env!r} has no bugs in its meta; '
          'allowed: tasks of generate_task'
      )
    self._files = dict(task.payload['files'])
    self._fixed = generate.fixed_files(task)
    self._bugs = {(b['file'], b['line']) for b in task.meta['bugs']}
    self._rng = rng
    self._noise = noise
    self._left = turns
    self._script = self._act()
    self._started = False

  def act(self, observation: str = '') -> str:
    """Returns the next action; the last one is `submit`, and then again."""
    self._left -= 1
    if self._left <= 0:
      return 'submit'
    if self._started:
      return self._script.send(observation)
    self._started = True
    return next(self._script)

  def _act(self):
    """Yields actions and receives observations."""
    noise, chance = self._noise, self._rng.random
    viewed: set[str] = set()
    seen = ''
    if chance() < noise.list_first:
      yield 'list'
    if chance() < noise.test_first:
      seen = yield 'test'
    else:
      file = self._rng.choice(sorted(self._files))
      viewed.add(file)
      yield f'view {file}'
      if self._files[file] == self._fixed[file]:
        seen = yield 'test'
    while True:
      for file, line in self._wrong_lines(seen):
        if file not in viewed:
          viewed.add(file)
          yield f'view {file}'
        yield self._edit(file, line)
      if chance() >= noise.verify:
        break
      seen = yield 'test'
      if seen == 'PASS':
        break
    while True:
      yield 'submit'

  def _wrong_lines(self, seen: str) -> list[tuple[str, int]]:
    """Returns the lines that need an edit, those of the failing file first."""
    wrong = [
        (file, number)
        for file in sorted(self._files)
        for number, (now, right) in enumerate(
            zip(self._files[file].split('\n'), self._fixed[file].split('\n')), 1
        )
        if now != right
    ]
    failing = seen.split(' ')[1] if seen.startswith('FAIL ') else ''
    return sorted(wrong, key=lambda place: place[0] != failing)

  def _edit(self, file: str, line: int) -> str:
    """Edits near `line`: right, or wrong in a plausible way."""
    noise, rng = self._noise, self._rng
    lines = self._files[file].split('\n')
    body = _body_of(lines, line)
    right = self._fixed[file].split('\n')[line - 1].strip()
    others = [n for n in body if n != line]
    if (file, line) not in self._bugs:  # it broke this line: it takes it back
      new = right
    elif rng.random() >= noise.right_line and others:
      line = rng.choice(others)
      new = self._variant(lines, line, lines[line - 1].strip())
    elif rng.random() < noise.right_fix:
      new = right
    else:
      new = self._variant(lines, line, right)
    self._files[file] = generate.replace_line(self._files[file], line, new)
    return f'edit {file} {line} {new}'

  def _variant(self, lines: list[str], line: int, text: str) -> str:
    """Returns a one-token change of `text`, not what the line has now."""
    above = lines[_body_of(lines, line)[0] - 2 : line - 1]
    names = re.findall(r'\b[a-z]\b', ' '.join(above))
    options = [
        v
        for v in one_token_changes(text, names)
        if v != lines[line - 1].strip()
    ]
    return self._rng.choice(options) if options else text


class MiniRepo:
  """The 'swe' environment's answers, without its sandbox.

  For text of the expert only: it executes the files in this process.
  """

  def __init__(self, task: types.Task):
    self.files = dict(task.payload['files'])
    self._tests = task.payload['tests']
    self._cases = execute.visible_cases(self._tests['tests.py'])
    self._hidden = task.payload['hidden_tests']['cases']

  def step(self, action: str) -> str:
    """Takes an action of the expert, returns the observation."""
    name, _, rest = action.partition(' ')
    if name == 'list':
      return ' '.join(sorted({*self.files, *self._tests}))
    if name == 'test':
      return execute.first_failure(self.files, self._cases) or 'PASS'
    if name == 'view':
      lines = self.files[rest].rstrip('\n').split('\n')
      return '\n'.join(f'{n} {text}' for n, text in enumerate(lines, 1))
    if name == 'edit':
      file, line, new = rest.split(' ', 2)
      self.files[file] = generate.replace_line(self.files[file], int(line), new)
      return 'ok'
    if name == 'submit':
      return ''
    raise ValueError(
        f'action {action!r}; allowed: list, test, view, edit, submit'
    )

  def solved(self) -> bool:
    """Says whether the hidden tests pass."""
    return execute.first_failure(self.files, self._hidden) is None


def simulate(
    task: types.Task, seed: int, noise: Noise = Noise(), turns: int = 10
) -> list[tuple[str, str]]:
  """Plays one episode of the expert.

  Args:
    task: a generated task.
    seed: seed of the expert's decisions.
    noise: how often they are right.
    turns: turn limit.

  Returns:
    (action, observation) pairs; the last is ('submit', '').
  """
  return play(task, seed, noise, turns)[0]


def play(
    task: types.Task, seed: int, noise: Noise = Noise(), turns: int = 10
) -> tuple[list[tuple[str, str]], bool]:
  """Plays as `simulate` does; returns the trace and whether it solved."""
  policy = ExpertPolicy(
      task, random.Random(f'{task.task_id}:{seed}'), noise, turns
  )
  repo = MiniRepo(task)
  trace: list[tuple[str, str]] = []
  observation = ''
  while not trace or trace[-1][0] != 'submit':
    action = policy.act(observation)
    observation = repo.step(action)
    trace.append((action, observation))
  return trace, repo.solved()


def corpus(tasks: Iterable[types.Task], seed: int = 0) -> Iterator[str]:
  """Yields texts to train a tokenizer on.

  What an episode of the expert shows, every name and number up to 99, and the
  errors that wrong edits can raise. Not the text of the tests: the agent has
  no need to read it, and it would take a tenth of the vocabulary.
  """
  yield from map(str, range(100))
  yield from templates.FUNCTION_NAMES
  yield from (f'{m}.py' for m in templates.MODULE_NAMES)
  yield from (f'FAIL util.py 2 stem(4) got {e} want 8' for e in _EXCEPTIONS)
  yield from _COMPLAINTS
  for task in tasks:
    yield task.prompt
    for action, observation in simulate(task, seed):
      yield action
      yield observation


def one_token_changes(text: str, names: Iterable[str]) -> list[str]:
  """Returns what one wrong token can make of a line.

  Args:
    text: a line of a generated function, without indentation.
    names: the variables that can stand for each other.
  """
  tokens = _TOKEN.findall(text)
  names = sorted(set(names))
  target = re.match(r'(?:for )?(\w+) (?:=|in) ', text)
  out = []
  for index, token in enumerate(tokens):
    if token.isdigit():
      others: Iterable[str] = [str(int(token) + 1), str(max(0, int(token) - 1))]
    elif token in names and not (target and index <= 2):
      others = [n for n in names if n != token]
    else:
      others = _CHANGES.get(token, ())
    for other in others:
      changed = ''.join([*tokens[:index], other, *tokens[index + 1 :]])
      if changed != text:
        out.append(changed)
  return out


_CHANGES: Mapping[str, tuple[str, ...]] = {
    **templates.OPERATORS,
    **templates.COMPARISONS,
}
_EXCEPTIONS = (
    'SyntaxError',
    'IndentationError',
    'NameError',
    'UnboundLocalError',
    'TypeError',
    'ZeroDivisionError',
    'AttributeError',
    'RecursionError',
    'None',
    'True',
    'False',
)
# What an environment answers to calls that the expert never makes.
_COMPLAINTS = (
    "ERR unknown tool 'x'",
    'ERR empty action',
    'ERR test takes no arguments',
    'ERR view takes FILE',
    'ERR edit takes FILE LINE TEXT',
    "ERR bad line number 'x'",
    "ERR no file 'x'",
    'ERR util.py has 9 lines',
    'ERR tests.py is read-only',
    'FAIL timeout',
)


@functools.lru_cache(maxsize=4096)
def _bodies(text: str) -> dict[int, list[int]]:
  """Returns for each body line (from 1) the body lines of its function."""
  out: dict[int, list[int]] = {}
  body: list[int] = []
  for number, line in enumerate(text.split('\n'), 1):
    if line.startswith(' '):
      body.append(number)
      out[number] = body
    else:
      body = []
  return out


def _body_of(lines: list[str], line: int) -> list[int]:
  return _bodies('\n'.join(lines))[line]
