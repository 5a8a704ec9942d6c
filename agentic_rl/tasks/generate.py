"""Generated miniature repositories, each with verified one-token bugs.

`generate_task(seed, split, difficulty)` is a pure function of its arguments.
Splits are disjoint by construction: a function instance has a key (template,
names, constants) and the hash of the key decides its bucket, so no function
of a held-out task ever occurs in training. Templates can also be reserved
whole, for the split 'ood'.

Every task is executed before it is returned: with the bug, visible and hidden
tests fail; with the fix, both pass. The hidden cases also refute every other
one-token change of the line with the bug.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from typing import Any, Iterator, Mapping, Sequence

from agentic_rl import types
from agentic_rl.tasks import execute
from agentic_rl.tasks import templates

GENERATOR_VERSION = 2
SPLITS = ('train', 'heldout', 'ood')
VISIBLE_CASES = 4
HIDDEN_CASES = 4
_LARGEST_SHOWN = 999  # results beyond it would only lengthen the observation


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
  if not condition:
    raise ValueError(f'{name} is {value!r}; allowed: {allowed}')


@dataclasses.dataclass(frozen=True)
class Difficulty:
  """The dial.

  Attributes:
    modules: files whose functions are tested.
    functions: least and most functions in a module.
    bugs: functions with a bug, one bug each.
    distractors: further files that no test touches.
  """

  modules: int = 2
  functions: tuple[int, int] = (1, 2)
  bugs: int = 1
  distractors: int = 0

  def __post_init__(self):
    low, high = self.functions
    files = self.modules + self.distractors
    _require(self.modules >= 1, 'modules', self.modules, 'at least 1')
    _require(1 <= low <= high, 'functions', self.functions, '1 <= low <= high')
    _require(self.distractors >= 0, 'distractors', self.distractors, '>= 0')
    _require(
        files <= len(templates.MODULE_NAMES),
        'modules + distractors',
        files,
        f'at most {len(templates.MODULE_NAMES)}',
    )
    _require(
        files * high <= len(templates.FUNCTION_NAMES),
        'functions in all',
        files * high,
        f'at most {len(templates.FUNCTION_NAMES)}',
    )
    _require(
        1 <= self.bugs <= self.modules * low,
        'bugs',
        self.bugs,
        f'1 to modules * least functions = {self.modules * low}',
    )

  @classmethod
  def parse(cls, value: str | Mapping[str, Any] | Difficulty) -> Difficulty:
    """Reads a preset's name, 'modules=3,functions=2-3,bugs=2', or a mapping."""
    if isinstance(value, Difficulty):
      return value
    if isinstance(value, str):
      if value in DIFFICULTIES:
        return DIFFICULTIES[value]
      pairs = dict(part.partition('=')[::2] for part in value.split(','))
    else:
      pairs = dict(value)
    fields = [f.name for f in dataclasses.fields(cls)]
    allowed = f'{sorted(DIFFICULTIES)} or fields {fields}'
    out: dict[str, Any] = {}
    for name, given in pairs.items():
      _require(name in fields, 'difficulty', value, allowed)
      try:
        if name == 'functions':
          parts = given.split('-') if isinstance(given, str) else given
          low, high = parts * 2 if len(parts) == 1 else parts
          out[name] = (int(low), int(high))
        else:
          out[name] = int(given)
      except (TypeError, ValueError):
        _require(False, f'difficulty {name}', given, 'an integer (or low-high)')
    return cls(**out)

  def to_json(self) -> dict[str, Any]:
    """Returns the fields as JSON values, which `parse` reads."""
    return {**dataclasses.asdict(self), 'functions': list(self.functions)}


DIFFICULTIES = {
    'tiny': Difficulty(modules=1, functions=(1, 1)),
    'default': Difficulty(),
    'hard': Difficulty(functions=(2, 3)),
    'long': Difficulty(modules=3, functions=(2, 3), bugs=2, distractors=1),
}


@dataclasses.dataclass(frozen=True)
class _Function:
  """A filled template: what one function of a repository is."""

  template: templates.Template
  name: str
  variables: Mapping[str, str]
  constants: Mapping[str, int]

  @property
  def key(self) -> str:
    """Identity for the splits: template|names|constants."""
    names = ','.join([self.name, *self.variables.values()])
    constants = ','.join(map(str, self.constants.values()))
    return f'{self.template.name}|{names}|{constants}'

  @property
  def fill(self) -> dict[str, str]:
    return {**self.variables, **templates.constant_fill(self.constants)}


def generate_task(
    seed: int,
    split: str = 'train',
    difficulty: Difficulty | str | Mapping[str, Any] = 'default',
    *,
    holdout_fraction: float = 0.1,
    holdout_templates: int = 0,
) -> types.Task:
  """Makes one task, a pure function of the arguments.

  Args:
    seed: any integer; tasks of other seeds are independent.
    split: 'train', 'heldout', or 'ood' (reserved templates only).
    difficulty: the dial: preset, text or mapping, see `Difficulty.parse`.
    holdout_fraction: share of function instances that training never sees,
      0.01 to 0.99.
    holdout_templates: templates reserved for 'ood', 0 to half of them.

  Raises:
    ValueError: an argument is out of range.
  """
  difficulty = Difficulty.parse(difficulty)
  allowed = split_templates(split, holdout_templates)
  _require(
      0.01 <= holdout_fraction <= 0.99,
      'holdout_fraction',
      holdout_fraction,
      '0.01 to 0.99',
  )
  rng = random.Random(f'{GENERATOR_VERSION}:{split}:{int(seed)}')
  while True:
    task = _attempt(rng, seed, split, difficulty, allowed, holdout_fraction)
    if task is not None:
      return task


def generate_tasks(
    count: int,
    split: str = 'train',
    difficulty='default',
    *,
    seed: int = 0,
    **options,
) -> Iterator[types.Task]:
  """Yields `count` tasks of distinct ids, from seeds `seed`, `seed + 1`, ..."""
  seen: set[str] = set()
  while len(seen) < count:
    task = generate_task(seed, split, difficulty, **options)
    seed += 1
    if task.task_id not in seen:
      seen.add(task.task_id)
      yield task


def split_templates(
    split: str, holdout_templates: int = 0
) -> tuple[templates.Template, ...]:
  """Returns the templates that a split may use.

  Raises:
    ValueError: unknown split, or 'ood' without reserved templates.
  """
  _require(split in SPLITS, 'split', split, f'one of {list(SPLITS)}')
  most = len(templates.TEMPLATES) // 2
  _require(
      0 <= holdout_templates <= most,
      'holdout_templates',
      holdout_templates,
      f'0 to {most}',
  )
  _require(
      split != 'ood' or holdout_templates > 0,
      'holdout_templates',
      holdout_templates,
      "at least 1 for the split 'ood'",
  )
  ordered = sorted(templates.TEMPLATES, key=lambda t: _digest(t.name))
  if split == 'ood':
    return tuple(ordered[:holdout_templates])
  return tuple(ordered[holdout_templates:])


def bucket(key: str, holdout_fraction: float = 0.1) -> str:
  """Returns the split that owns a function's key: 'train' or 'heldout'."""
  held = _digest(key) < holdout_fraction * 2**32
  return 'heldout' if held else 'train'


def disjointness_report(
    train: Sequence[types.Task], heldout: Sequence[types.Task]
) -> dict[str, dict[str, int]]:
  """Counts what two task sets share, per kind.

  Templates, names and constants may be shared one by one; 'functions' (all of
  them jointly) and 'tasks' must not be: their 'overlap' is 0.
  """
  sides = [_kinds(train), _kinds(heldout)]
  return {
      kind: {
          'train': len(sides[0][kind]),
          'heldout': len(sides[1][kind]),
          'overlap': len(sides[0][kind] & sides[1][kind]),
      }
      for kind in sides[0]
  }


def verify_task(task: types.Task) -> list[str]:
  """Executes a generated task with the bug and with the fix.

  Only for tasks of this generator: the code runs in this process.

  Returns:
    What is wrong, a sentence each; nothing if the task is sound.
  """
  files = dict(task.payload['files'])
  visible = execute.visible_cases(task.payload['tests']['tests.py'])
  hidden = task.payload['hidden_tests']['cases']
  problems = []
  for name, cases in (('visible', visible), ('hidden', hidden)):
    if execute.first_failure(files, cases) is None:
      problems.append(f'{name} tests pass with the bug')
  fixed = fixed_files(task)
  for name, cases in (('visible', visible), ('hidden', hidden)):
    failure = execute.first_failure(fixed, cases)
    if failure:
      problems.append(f'{name} tests fail with the fix: {failure}')
  seen = {(m, f, tuple(a)) for m, f, a, _ in visible}
  if any((m, f, tuple(a)) in seen for m, f, a, _ in hidden):
    problems.append('a hidden case is visible')
  return problems


def fixed_files(task: types.Task) -> dict[str, str]:
  """Returns the files after the solution: every bug's line replaced."""
  files = dict(task.payload['files'])
  for bug in task.meta['bugs']:
    files[bug['file']] = replace_line(
        files[bug['file']], bug['line'], bug['new']
    )
  return files


def replace_line(text: str, line: int, new: str) -> str:
  """Replaces line `line` (from 1), keeping its indentation."""
  lines = text.split('\n')
  old = lines[line - 1]
  lines[line - 1] = old[: len(old) - len(old.lstrip())] + new
  return '\n'.join(lines)


# ---------------------------------------------------------------- one attempt


def _attempt(rng, seed, split, difficulty, allowed, fraction):
  """Draws a task; None if it turns out not to be verifiable."""
  count = difficulty.modules + difficulty.distractors
  low, high = difficulty.functions
  modules = rng.sample(templates.MODULE_NAMES, count)
  tested = modules[: difficulty.modules]
  sizes = [rng.randint(low, high) for _ in modules]
  names = rng.sample(templates.FUNCTION_NAMES, sum(sizes))
  functions: dict[str, list[_Function]] = {}
  for module, size in zip(modules, sizes):
    functions[module] = [
        _function(rng, names.pop(), allowed, split, fraction)
        for _ in range(size)
    ]
  places = [(m, n) for m in tested for n in range(len(functions[m]))]
  buggy = set(rng.sample(places, difficulty.bugs))
  visible, hidden, bugs, files = [], [], [], {}
  for module in sorted(modules):
    lines: list[str] = []
    for number, function in enumerate(functions[module]):
      chosen = _choose(rng, function, (module, number) in buggy)
      if chosen is None:
        return None
      variant, seen_inputs, hidden_inputs = chosen
      source = function.template.lines(function.name, function.fill)
      if variant is not None:
        bugs.append(
            _plant(source, variant, function, f'{module}.py', len(lines))
        )
      lines += source
      if module in tested:
        visible += _cases(module, function, seen_inputs)
        hidden += _cases(module, function, hidden_inputs)
    files[f'{module}.py'] = '\n'.join(lines) + '\n'
  every = [f for m in sorted(modules) for f in functions[m]]
  task = types.Task.create(
      'swe',
      ' '.join(sorted(files)),
      {
          'files': files,
          'tests': {'tests.py': execute.tests_script(visible)},
          'hidden_tests': {'cases': hidden},
      },
      {
          'generator': GENERATOR_VERSION,
          'seed': int(seed),
          'split': split,
          'difficulty': difficulty.to_json(),
          'templates': [f.template.name for f in every],
          'keys': [f.key for f in every],
          'bugs': bugs,
      },
  )
  return None if _unsound(files, visible, hidden, task) else task


def _unsound(files, visible, hidden, task) -> bool:
  """Executes the files with and without the bug, as `verify_task` does."""
  fixed = fixed_files(task)
  failure = execute.first_failure(files, visible)
  return (
      failure is None
      or execute.first_failure(files, hidden) is None
      or execute.first_failure(fixed, visible) is not None
      or execute.first_failure(fixed, hidden) is not None
  )


def _function(rng, name, allowed, split, fraction) -> _Function:
  """Draws a function instance of the split's bucket."""
  while True:
    template = rng.choice(allowed)
    roles = [r for r in template.roles if r in 'abti']
    letters = rng.sample(templates.VARIABLE_NAMES, len(roles))
    values = rng.sample(templates.CONSTANTS, len(template.constants))
    function = _Function(
        template,
        name,
        dict(zip(roles, letters)),
        dict(zip(template.constants, values)),
    )
    if split == 'ood' or bucket(function.key, fraction) == split:
      return function


def _plant(source, variant, function, file, before) -> dict[str, Any]:
  """Puts a bug into `source` and describes it."""
  at = 2 + variant.line
  right = source[at]
  (source[at],) = templates.render([variant.text], function.fill, '  ')
  return {
      'file': file,
      'line': before + at + 1,
      'old': source[at].strip(),
      'new': right.strip(),
      'function': function.name,
      'kind': variant.kind,
  }


def _cases(module, function, inputs) -> list[list[Any]]:
  truth, _ = _profile(function.template, tuple(function.constants.values()))
  return [[module, function.name, list(i), truth[i]] for i in inputs]


# ------------------------------------------------------- bugs and their cases


@functools.lru_cache(maxsize=4096)
def _profile(template: templates.Template, constants: tuple[int, ...]):
  """Executes the function and all its variants on every input.

  Returns:
    The results by input, and for each variant the inputs that refute it and
    whether all its results are short numbers, as a bug's should be.
  """
  right, *others = template.compiled
  truth = {i: right(*i, *constants) for i in template.inputs}
  refuted = []
  for other in others:
    got = {i: _result(other, (*i, *constants)) for i in template.inputs}
    wrong = tuple(i for i in template.inputs if got[i] != truth[i])
    short = all(
        isinstance(g, int) and abs(g) <= _LARGEST_SHOWN for g in got.values()
    )
    refuted.append((wrong, short))
  return truth, tuple(refuted)


def _result(function, args):
  try:
    return function(*args)
  except ArithmeticError as error:
    return type(error).__name__


def _choose(rng, function: _Function, with_bug: bool):
  """Chooses the bug (or None), the visible and the hidden inputs."""
  template = function.template
  _, refuted = _profile(template, tuple(function.constants.values()))
  if not with_bug:
    inputs = rng.sample(template.inputs, VISIBLE_CASES + HIDDEN_CASES)
    return None, inputs[:VISIBLE_CASES], inputs[VISIBLE_CASES:]
  fit: dict[str, list[int]] = {}
  for number, variant in enumerate(template.variants):
    wrong, short = refuted[number]
    if short and len(wrong) >= 2:  # one visible case and one hidden
      fit.setdefault(variant.kind, []).append(number)
  number = rng.choice(fit[rng.choice(sorted(fit))])
  variant = template.variants[number]
  rivals = [
      wrong
      for (wrong, _), other in zip(refuted, template.variants)
      if other.line == variant.line and wrong
  ]
  first = rng.choice(refuted[number][0])
  hidden = _refute(rng, rivals, first)
  if hidden is None:
    return None
  spare = [i for i in template.inputs if i != first and i not in hidden]
  more = max(0, HIDDEN_CASES - len(hidden))
  drawn = rng.sample(spare, VISIBLE_CASES - 1 + more)
  visible = [first, *drawn[more:]]
  hidden += drawn[:more]
  rng.shuffle(visible)
  return variant, visible, hidden


def _refute(rng, rivals, taken) -> list | None:
  """Chooses inputs other than `taken` so that each rival fails on one.

  None if there are none.
  """
  chosen: list = []
  for wrong in sorted(rivals, key=len):
    if any(i in chosen for i in wrong):
      continue
    free = [i for i in wrong if i != taken]
    if not free:
      return None
    chosen.append(rng.choice(free))
  return chosen


# -------------------------------------------------------------------- helpers


def _kinds(tasks: Sequence[types.Task]) -> dict[str, set[str]]:
  out: dict[str, set[str]] = {
      k: set() for k in ('templates', 'names', 'constants', 'functions')
  }
  for task in tasks:
    for key in task.meta['keys']:
      template, names, constants = key.split('|')
      out['templates'].add(template)
      out['names'].add(names)
      out['constants'].add(constants)
      out['functions'].add(key)
  return {**out, 'tasks': {t.task_id for t in tasks}}


def _digest(text: str) -> int:
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], 'big')
