"""Counts how often each bundle of a TPU listing is issued.

A listing is what libtpu writes of an op after register allocation
(`packed-bundles-post-ra`): VLIW bundles in order, each with a scalar unit that
counts loops and decides branches. Here the scalar instructions that branches
depend on are carried out, nothing else. So loops over the grid or with constant
bounds, and regions that run in the first or last step only, are counted
exactly. What is read from memory is not known; a branch on it is one of

  * a loop that depends on data: its trips must be stated, in all;
  * a region that depends on data: counted as run each time, or as stated.

Copies between HBM and the core are counted with their sizes in the same way; one
under a predicate that depends on data counts as made each time.

  b:   { %s1_s0 = smov 0 }                    a bundle: `;;` between its units
  b+1 LB: > { %s2_s0 = sphi %s1_s0, %s3_s0 }  names end in the register they use
  b+9  : > { %9 = sbr.rel (!%p4_p1) target bundleno = 1 }

A branch takes effect four bundles later; those are issued in any case.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
import re
from typing import Any, Callable, Sequence

DELAY = 4  # bundles behind a branch that are issued in any case
LEAST = 64  # bundles of a region that may be stated; smaller ones count as run
_MOST_STEPS = 50_000_000  # a loop that does not end is not understood

_BUNDLE = re.compile(r'^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)*:(?:\s*>)*\s*\{')
_COMMENT = re.compile(r'/\*.*?\*/', re.DOTALL)
_NAME = re.compile(r'%([sp]\w*?_([sp]\d+))\b')
_WORD = re.compile(r'%[sp]\w*?_(?P<register>[sp]\d+)\b|(?P<number>-?\d+)\b')
_WRITE = re.compile(r'%[sp]\w*?_([sp]\d+) = ([a-z_]+)(?:\.(\S+))? ?(.*)', re.S)
_GUARD = re.compile(r'\((!?)%p\w*?_(p\d+)(?:, ([^)]*))?\)')
_BRANCH = re.compile(
    r'sbr\.rel (?:\((!?)(%p\w+?_(p\d+))\) )?target bundleno = (\d+)'
)
_SLOT = re.compile(r'\[smem:\[#(\w+_spill)\]\]')
_COPY = re.compile(
    r'dma\.(?:hbm_to_[vs]mem|[vs]mem_to_hbm)\b(?: \[[^\]]*\])?(.*)', re.S
)
_OPERAND = re.compile(
    r' = inlined_call_operand\.<no memory space> \[shape: s32\[\], index: (\d+),'
)


def _signed(x: int) -> int:
  return x - (1 << 32) if x >> 31 else x


_INTEGERS: dict[str, Callable[[int, int], int]] = {
    'sadd': operator.add,
    'ssub': operator.sub,
    'smul': operator.mul,
    'sand': operator.and_,
    'sor': operator.or_,
    'sxor': operator.xor,
    'sshll': lambda a, b: a << (b & 31),
    'sshrl': lambda a, b: a >> (b & 31),
    'sshra': lambda a, b: _signed(a) >> (b & 31),
}
_ORDERS = {
    name: getattr(operator, name) for name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge')
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
  """A loop, or a region that a branch may skip.

  Attributes:
    kind: 'loop' or 'region'.
    start: its first bundle.
    size: bundles from its first to its last.
    runs: how often it runs (of a loop: trips in all), None if not known.
    entered: how often a loop is reached; of a region as `runs`.
    data: whether that depends on data and may be stated.
  """

  kind: str
  start: int
  size: int
  runs: float | None
  entered: float | None
  data: bool


@dataclasses.dataclass(frozen=True)
class Count:
  """What `count` found.

  Attributes:
    times: for each bundle, how often it is issued; None if not known.
    parts: in the order of the listing.
    copied: granules that go from HBM or to it; None if not known.
  """

  times: list[float | None]
  parts: list[Part]
  copied: float | None


def count(
    listing: str,
    scalars: Sequence[int] = (),
    loops: Sequence[float] | None = None,
    regions: Sequence[float] | None = None,
) -> Count:
  """Counts how often each bundle is issued.

  Args:
    listing: of one op.
    scalars: values of the op's scalar operands, such as the size of a grid that
      depends on data.
    loops: trips in all of each loop that depends on data, in the order of the
      listing; None leaves them unknown.
    regions: runs in all of each region of `LEAST` bundles or more that depends
      on data; None counts them as run.

  Raises:
    ValueError: if what is stated does not fit, or the listing is not in the
      known form.
  """
  bundles = _bundles(listing)
  spans = _spans(bundles)
  machine = _Machine(bundles, spans, scalars)
  machine.run()
  return _weigh(machine, spans, len(bundles), loops, regions)


def _bundles(listing: str) -> list[str]:
  """Returns the text of each bundle; their numbers run from 0."""
  found: list[str] = []
  for line in listing.splitlines():
    match = _BUNDLE.match(line)
    if match:
      if int(match[1], 0) != len(found):
        raise ValueError(f'bundle {match[1]} where {len(found)} was expected')
      line = line[match.end() :]
      found.append(line)
    elif found:
      found[-1] += line
  if not found:
    raise ValueError('no bundle found: the form of the listing is not known')
  return [_COMMENT.sub(' ', text) for text in found]


@dataclasses.dataclass
class _Span:
  """A part while it is counted; `branch` is the bundle that decides it."""

  start: int
  end: int
  branch: int
  loop: bool
  entered: int = 0
  passed: int = 0
  data: bool = False


def _spans(bundles: list[str]) -> list[_Span]:
  """Returns loops and regions, outer ones first."""
  spans = []
  for i, text in enumerate(bundles):
    for match in _BRANCH.finditer(text):
      target = int(match[4])
      if target > i:
        spans.append(_Span(i + 1 + DELAY, target - 1, i, False))
      else:
        spans.append(_Span(target, min(i + DELAY, len(bundles) - 1), i, True))
  # A region of the extent of a loop is a guard around it.
  spans.sort(key=lambda s: (s.start, -s.end, s.loop))
  return spans


# ------------------------------------------------------------- instructions


def _read(text: str, registers: dict[str, Any]) -> Any:
  """Returns the value of an operand, None if it is not known."""
  match = _WORD.fullmatch(text.strip())
  if not match:
    return None
  if match['register']:
    return registers.get(match['register'])
  return int(match['number']) & 0xFFFFFFFF


def _logic(kind: str, values) -> bool | None:
  """Returns pand, por, pnand, pnor or pxor of values that may be unknown."""
  if kind.endswith('xor'):
    return None if None in values else values[0] != values[1]
  decisive = kind.endswith('or')  # one such value decides
  if decisive in values:
    out = decisive
  elif None in values:
    return None
  else:
    out = not decisive
  return not out if kind in ('pnand', 'pnor') else out


def _evaluate(kind: str, form: str, values) -> Any:
  """Returns the result of a scalar instruction, None if it is not known."""
  if kind in ('smov', 'pmov', 'sst'):
    return values[0]
  if kind == 'pneg':
    return None if values[0] is None else not values[0]
  if kind in ('pand', 'por', 'pnand', 'pnor', 'pxor'):
    return _logic(kind, values)
  if kind == 'scalar_select':
    if values[0] is None:
      return values[1] if values[1] == values[2] else None
    return values[1] if values[0] else values[2]
  if None in values:
    return None
  if kind in _INTEGERS:
    return _INTEGERS[kind](*values) & 0xFFFFFFFF
  wide = [_signed(v) for v in values] if 's32' in form else values
  if kind in ('smin', 'smax'):
    return (min if kind == 'smin' else max)(wide) & 0xFFFFFFFF
  if kind == 'scmp':
    return _ORDERS[form.split('.')[0]](*wide)
  return None


@dataclasses.dataclass
class _Step:
  """A scalar instruction that a branch depends on.

  Attributes:
    target: the register or spill slot that it writes.
    kind: its name, 'scmp'.
    form: the rest of it, 'ge.s32.totalorder'.
    words: its operands.
    guard: the predicate register under which it is done, if any.
    negated: whether the guard is.
    other: the operand that is written if the guard fails, or ''.
  """

  target: str
  kind: str
  form: str
  words: list[str]
  guard: str = ''
  negated: bool = False
  other: str = ''

  def value(self, registers: dict[str, Any]) -> Any:
    """Returns what the target holds afterwards, None if it is not known."""
    if self.kind in ('sld', 'inlined_call_operand'):
      new = registers.get(self.words[0])
    else:
      values = [_read(w, registers) for w in self.words]
      new = _evaluate(self.kind, self.form, values)
    if not self.guard:
      return new
    holds = registers.get(self.guard)
    if self.other:
      old = _read(self.other, registers)
    else:
      old = registers.get(self.target)
    if holds is None:
      return new if new == old else None
    return new if holds != self.negated else old


def _unguarded(text: str) -> tuple[re.Match[str] | None, str]:
  """Returns the guard of an instruction, and its operands without it."""
  guard = _GUARD.search(text)
  if guard:
    text = text[: guard.start()] + text[guard.end() :].lstrip(', ')
  return guard, text


def _step(text: str) -> tuple[_Step, list[str]] | None:
  """Reads an instruction; returns it and the names that it depends on."""
  slot, operand = _SLOT.search(text), _OPERAND.search(text)
  if ' = sst ' in text:
    if not slot:
      return None
    target, kind, form, rest = slot[1], 'sst', '', text[slot.end() :]
  else:
    match = _WRITE.match(text)
    if not match:
      return None
    target, kind, form, rest = match[1], match[2], match[3] or '', match[4]
  guard, rest = _unguarded(rest)
  step = _Step(target, kind, form, [])
  if guard:
    step.guard, step.negated = guard[2], bool(guard[1])
    step.other = guard[3] or ''
  names = [m[1] for m in _NAME.finditer(rest)]
  if guard:
    names += [m[1] for m in _NAME.finditer(guard[0])]
  step.words = [w.strip() for w in rest.split(',')]
  if operand:
    step.words = [f'operand {operand[1]}']
  elif kind == 'sld':
    step.words = [slot[1] if slot else '']
    names = [slot[1]] if slot else []
  return step, names


@dataclasses.dataclass
class _Copy:
  """A copy from HBM or to it.

  Attributes:
    size: operand that holds its granules.
    guard: the predicate register under which it is made, if any.
    negated: whether the guard is.
    granules: copied so far, None if a size was not known.
  """

  size: str
  guard: str = ''
  negated: bool = False
  granules: int | None = 0

  def make(self, registers: dict[str, Any]) -> None:
    """Adds its granules, unless the guard is known to fail."""
    if self.guard and registers.get(self.guard) is self.negated:
      return
    size = _read(self.size, registers)
    if size is None or self.granules is None:
      self.granules = None
    else:
      self.granules += size


def _copies(bundles: list[str]) -> tuple[dict[int, list[_Copy]], list[str]]:
  """Returns the copies by bundle, and the names that they depend on."""
  found: dict[int, list[_Copy]] = {}
  names: list[str] = []
  for i, text in enumerate(bundles):
    for part in text.split(';;'):
      match = _COPY.search(part)
      if not match or 'shalt.err' in part:  # a check, not a copy
        continue
      guard, rest = _unguarded(match[1])
      copy = _Copy(rest.strip(' }').split(',')[1].strip())
      if guard:
        copy.guard, copy.negated = guard[2], bool(guard[1])
        names += [m[1] for m in _NAME.finditer(guard[0])]
      names += [m[1] for m in _NAME.finditer(copy.size)]
      found.setdefault(i, []).append(copy)
  return found, names


def _slice(bundles: list[str], also: list[str]) -> dict[int, list[_Step]]:
  """Returns, by bundle, the instructions that branches and others depend on.

  Args:
    bundles: of the listing.
    also: names that others than branches depend on.
  """
  made: dict[str, list[tuple[int, _Step, list[str]]]] = {}
  wanted = list(also)
  for i, text in enumerate(bundles):
    for part in text.split(';;'):
      part = part.strip(' {}')
      branch = _BRANCH.search(part)
      if branch:
        if branch[2]:
          wanted.append(branch[2][1:])
        continue
      read = _step(part)
      if read is None:
        continue
      step, names = read
      key = step.target
      if step.kind != 'sst':
        key = _NAME.match(part)[1]  # type: ignore[index]
      made.setdefault(key, []).append((i, step, names))
  steps: dict[int, list[_Step]] = {}
  seen = set()
  while wanted:
    name = wanted.pop()
    if name in seen:
      continue
    seen.add(name)
    for i, step, names in made.get(name, ()):
      wanted += names
      if step.kind != 'sphi':  # its operands share its register
        steps.setdefault(i, []).append(step)
  return steps


class _Machine:
  """The scalar unit, as far as branches depend on it."""

  def __init__(self, bundles: list[str], spans: list[_Span], scalars):
    self._size = len(bundles)
    self.copies, names = _copies(bundles)
    self._steps = _slice(bundles, names)
    self._branches: dict[int, tuple[str, bool, int, _Span]] = {}
    for span in spans:
      match = _BRANCH.search(bundles[span.branch])
      assert match
      self._branches[span.branch] = (
          match[3] or '', bool(match[1]), int(match[4]), span
      )  # fmt: skip
    stops = {*self._steps, *self._branches, *(s.end + 1 for s in spans)}
    stops |= self.copies.keys()
    self._stops = sorted(stops)
    indices = sorted({int(i) for b in bundles for i in _OPERAND.findall(b)})
    if scalars and len(scalars) != len(indices):
      raise ValueError(
          f'scalars={list(scalars)}: the op has {len(indices)} scalar operands'
      )
    self._registers: dict[str, Any] = {
        f'operand {i}': value for i, value in zip(indices, scalars)
    }
    self._forget: dict[int, set[str]] = {}
    self._both: set[int] = set()
    self._starts = [0] * (self._size + 1)

  def run(self) -> None:
    """Goes through the listing once."""
    at, steps = 0, 0
    while at < self._size:
      steps += 1
      if steps > _MOST_STEPS:
        raise ValueError(f'no end of the loop at bundle {at}')
      at = self._straight(at)

  @property
  def times(self) -> list[int]:
    """How often each bundle was issued."""
    total, out = 0, []
    for change in self._starts[: self._size]:
      total += change
      out.append(total)
    return out

  def _straight(self, at: int) -> int:
    """Issues bundles from `at` to the next jump; returns where that goes."""
    begin, jump, last = at, None, self._size - 1
    place = bisect.bisect_left(self._stops, at)
    while place < len(self._stops) and self._stops[place] <= last:
      at = self._stops[place]
      place += 1
      for register in self._forget.pop(at, ()):
        self._registers[register] = None
      # All units of a bundle read before any of them writes.
      values = [
          (step.target, step.value(self._registers))
          for step in self._steps.get(at, ())
      ]
      for copy in self.copies.get(at, ()):
        copy.make(self._registers)
      if at in self._branches and jump is None:
        jump = self._decide(at)
        if jump is not None:
          last = min(at + DELAY, last)
      self._registers.update(values)
    self._starts[begin] += 1
    self._starts[last + 1] -= 1
    return last + 1 if jump is None else jump

  def _decide(self, at: int) -> int | None:
    """Returns where the branch at a bundle goes, None if on."""
    register, negated, target, span = self._branches[at]
    value: Any = True
    if register:
      value = self._registers.get(register)
      value = None if value is None else value != negated
    elif not span.loop and at + 1 + DELAY in self._both:
      value = None  # the end of one of two alternatives that depend on data
    span.passed += 1
    if value is None:
      span.data = True
      written = {
          s.target
          for i in range(span.start, span.end + 1)
          for s in self._steps.get(i, ())
      }
      if span.loop:
        self._registers |= dict.fromkeys(written)
        span.entered += 1
      else:
        self._both.add(target)
        self._forget.setdefault(target, set()).update(written)
      return None
    if span.loop:
      span.entered += not value
    else:
      self._both.discard(target)
      span.passed -= value
    return target if value else None


# ----------------------------------------------------------------- counting


def _weigh(machine, spans, size, loops, regions) -> Count:
  """Applies what is stated to the counts of one pass."""
  inside: list[int | None] = [None] * size  # the smallest part on data
  parents: list[int | None] = []
  left = [0] * len(spans)  # bundles less those of parts on data within
  for place, span in enumerate(spans):
    if span.start > span.end:
      parents.append(None)
      continue
    parents.append(inside[span.start])
    if span.data:
      for i in range(span.start, span.end + 1):
        inside[i] = place
  for holder in inside:
    if holder is not None:
      left[holder] += 1
  asked_loops = [p for p, s in enumerate(spans) if s.data and s.loop]
  asked_regions = [
      p
      for p, s in enumerate(spans)
      if s.data and not s.loop and left[p] >= LEAST
  ]
  given = _given('loops', loops, asked_loops, spans, left)
  given |= _given('regions', regions, asked_regions, spans, left)
  factors: list[float | None] = []
  for place, span in enumerate(spans):
    parent = parents[place]
    factor: float | None = 1.0 if parent is None else factors[parent]
    if place in given:
      if not span.passed and given[place]:
        raise ValueError(f'{given[place]} runs of a part that is never reached')
      factor = given[place] / max(span.passed, 1)
    elif span.data and span.loop:
      factor = None
    factors.append(factor)
  scale = lambda n, factor: None if factor is None else n * factor
  parts = []
  for place, span in enumerate(spans):
    parent = parents[place]
    outer = 1.0 if parent is None else factors[parent]
    factor = factors[place]
    entered = span.entered if span.loop else span.passed
    parts.append(
        Part(
            'loop' if span.loop else 'region',
            span.start,
            span.end - span.start + 1,
            scale(span.passed, factor),
            scale(entered, outer if span.loop else factor),
            place in asked_loops or place in asked_regions,
        )
    )
  within = [1.0 if holder is None else factors[holder] for holder in inside]
  times = [scale(n, factor) for n, factor in zip(machine.times, within)]
  copied: float | None = 0.0
  for i, copies in machine.copies.items():
    for copy in copies:
      factor = within[i] if copy.granules else 0.0
      if copy.granules is None or factor is None or copied is None:
        copied = None
      else:
        copied += copy.granules * factor
  return Count(times, parts, copied)


def _given(name, stated, asked, spans, left) -> dict[int, float]:
  if stated is None:
    return {}
  if len(stated) != len(asked):
    found = [(spans[p].start, left[p]) for p in asked]
    raise ValueError(
        f'{name}={list(stated)}: {len(asked)} {name} depend on data, (first'
        f' bundle, bundles) = {found}'
    )
  return dict(zip(asked, stated))
