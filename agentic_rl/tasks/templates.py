"""Function templates of the generated repositories, and their one-token bugs.

First stage of the flow: `generate` fills templates with names and constants.
A template is a specification comment, parameters and a short body. The comment
states exactly what the function does, so the right fix of any one-token bug
can be derived from the text that the agent reads.

Placeholders: `{a} {b}` parameters, `{t}` a local, `{i}` a loop variable,
`{p} {q}` constants (and `{p+1} {p-1} {q+1} {q-1}` in variants).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Mapping

# Changing anything here changes the tasks: raise `generate.GENERATOR_VERSION`.
FUNCTION_NAMES = tuple(
    'stem pick fold gain lift drop rank wrap trim cost load mark pace reach '
    'scan seek size slot span spin step tick turn unit gaze wind zone bend '
    'bump cast clip crop dash edge fill flow grip hold join knit link melt '
    'move pull push roll'.split()
)
MODULE_NAMES = tuple(
    'util core base calc tool data grid plan flux node port rule'.split()
)
VARIABLE_NAMES = tuple('abcdehkmnpxy')
CONSTANTS = tuple(range(2, 10))

_TOKEN = re.compile(r'\{[^}]*\}|\w+|//|[<>=!]=|[^\w\s]|\s+')
OPERATORS = {
    '+': ('-', '*'),
    '-': ('+', '*'),
    '*': ('+', '-'),
    '//': ('%', '*'),
    '%': ('//', '*'),
}
COMPARISONS = {
    '<': ('<=', '>'),
    '>': ('>=', '<'),
    '<=': ('<', '>='),
    '>=': ('>', '<='),
    '==': ('!=', '<'),
    '!=': ('==', '<'),
}
KINDS = ('operator', 'comparison', 'constant', 'variable')


@dataclasses.dataclass(frozen=True)
class Variant:
  """A one-token change of a body line.

  Attributes:
    line: index of the body line.
    kind: one of `KINDS`.
    text: the changed line, still with placeholders and relative indentation.
  """

  line: int
  kind: str
  text: str


@dataclasses.dataclass(frozen=True)
class Template:
  """A function before names and constants are chosen.

  Attributes:
    name: identity of the template.
    spec: what the comment says, an expression over the placeholders.
    body: lines with indentation relative to the body.
    high: largest input that tests use.
  """

  name: str
  spec: str
  body: tuple[str, ...]
  high: int = 9

  @functools.cached_property
  def roles(self) -> tuple[str, ...]:
    """Placeholders in use, in the order a, b, t, i, p, q."""
    text = self.spec + ' '.join(self.body)
    return tuple(r for r in 'abtipq' if f'{{{r}}}' in text)

  @functools.cached_property
  def params(self) -> tuple[str, ...]:
    """Placeholders of the parameters."""
    return tuple(r for r in self.roles if r in 'ab')

  @functools.cached_property
  def constants(self) -> tuple[str, ...]:
    """Placeholders of the constants."""
    return tuple(r for r in self.roles if r in 'pq')

  @functools.cached_property
  def inputs(self) -> tuple[tuple[int, ...], ...]:
    """Every argument tuple that tests may use."""
    return tuple(
        itertools.product(range(self.high + 1), repeat=len(self.params))
    )

  @functools.cached_property
  def variants(self) -> tuple[Variant, ...]:
    """Every one-token change of every body line."""
    out: list[Variant] = []
    scope = set(self.params)
    for number, text in enumerate(self.body):
      if not text.startswith(' '):
        scope.discard('i')  # the loop is over
      out.extend(_line_variants(number, text, sorted(scope)))
      scope |= _targets(text)
    return tuple(out)

  @functools.cached_property
  def compiled(self) -> tuple:
    """The correct function, then one for each variant.

    They take the parameters and then the constants, so that one compilation
    serves all names and constants.
    """
    bodies = [self.body]
    for variant in self.variants:
      body = list(self.body)
      body[variant.line] = variant.text
      bodies.append(tuple(body))
    fill = {r: r for r in self.roles}
    for c in self.constants:
      fill.update({f'{c}+1': f'({c} + 1)', f'{c}-1': f'({c} - 1)'})
    arguments = ', '.join(self.params + self.constants)
    source = [
        line
        for n, body in enumerate(bodies)
        for line in (f'def f{n}({arguments}):', *render(body, fill, '  '))
    ]
    scope: dict = {}
    exec('\n'.join(source), scope)  # our own text, from the literals below
    return tuple(scope[f'f{n}'] for n in range(len(bodies)))

  def lines(self, name: str, fill: Mapping[str, str]) -> list[str]:
    """Returns the source: comment, definition, body."""
    params = ', '.join(fill[r] for r in self.params)
    return [
        *render([f'# {self.spec}'], fill),
        f'def {name}({params}):',
        *render(self.body, fill, '  '),
    ]


def render(lines, fill: Mapping[str, str], indent: str = '') -> list[str]:
  """Fills the placeholders of `lines`."""
  return [
      indent + re.sub(r'\{([^}]*)\}', lambda m: fill[m.group(1)], line)
      for line in lines
  ]


def constant_fill(constants: Mapping[str, int]) -> dict[str, str]:
  """Returns the texts of constants and of their neighbours."""
  fill = {}
  for role, value in constants.items():
    fill[role] = str(value)
    fill[f'{role}+1'] = str(value + 1)
    fill[f'{role}-1'] = str(value - 1)
  return fill


def _targets(text: str) -> set[str]:
  """Roles that a line assigns."""
  match = re.match(r'\s*(?:for )?\{([ti])\} (?:=|in) ', text)
  return {match.group(1)} if match else set()


def _line_variants(number: int, text: str, scope: list[str]) -> list[Variant]:
  tokens = _TOKEN.findall(text)
  first = len(text) - len(text.lstrip())
  targets = {first, first + len('for ')} if _targets(text) else set()
  out = []
  offset = 0
  for index, token in enumerate(tokens):
    at, offset = offset, offset + len(token)
    if token in OPERATORS:
      kind = 'operator'
      others: tuple[str, ...] = OPERATORS[token]
    elif token in COMPARISONS:
      kind, others = 'comparison', COMPARISONS[token]
    elif token in ('{p}', '{q}'):
      kind = 'constant'
      others = tuple(f'{{{token[1]}{s}}}' for s in ('+1', '-1'))
    elif token[0] == '{' and at not in targets:
      kind = 'variable'
      others = tuple(f'{{{r}}}' for r in scope if r != token[1])
    else:
      continue
    for other in others:
      changed = ''.join([*tokens[:index], other, *tokens[index + 1 :]])
      out.append(Variant(number, kind, changed))
  return out


def _t(name: str, spec: str, *body: str, high: int = 9) -> Template:
  return Template(name, spec, body, high)


TEMPLATES = (
    _t('affine', '{a} * {p} + {b}', '{t} = {a} * {p}', 'return {t} + {b}'),
    _t(
        'affine_minus', '{a} * {p} - {b}', '{t} = {a} * {p}', 'return {t} - {b}'
    ),
    _t('line', '{a} * {p} + {q}', '{t} = {a} * {p}', 'return {t} + {q}'),
    _t('line_minus', '{a} * {p} - {q}', '{t} = {a} * {p}', 'return {t} - {q}'),
    _t(
        'lift_scale', '({a} + {p}) * {b}', '{t} = {a} + {p}', 'return {t} * {b}'
    ),
    _t(
        'drop_scale', '({a} - {p}) * {q}', '{t} = {a} - {p}', 'return {t} * {q}'
    ),
    _t('sum_mod', '({a} + {b}) % {p}', '{t} = {a} + {b}', 'return {t} % {p}'),
    _t('product_mod', '{a} * {b} % {p}', '{t} = {a} * {b}', 'return {t} % {p}'),
    _t(
        'sum_part', '({a} + {b}) // {p}', '{t} = {a} + {b}', 'return {t} // {p}'
    ),
    _t('part_sum', '{a} // {p} + {b}', '{t} = {a} // {p}', 'return {t} + {b}'),
    _t('mod_sum', '{a} % {p} + {b}', '{t} = {a} % {p}', 'return {t} + {b}'),
    _t(
        'mod_scale',
        '{a} % {p} * {q}',
        '{t} = {a} % {p}',
        'return {t} * {q}',
        high=15,
    ),
    _t('square_plus', '{a} * {a} + {p}', '{t} = {a} * {a}', 'return {t} + {p}'),
    _t(
        'square_minus', '{a} * {a} - {b}', '{t} = {a} * {a}', 'return {t} - {b}'
    ),
    _t(
        'weighted',
        '{a} * {p} + {b} * {q}',
        '{t} = {a} * {p}',
        'return {t} + {b} * {q}',
    ),
    _t(
        'weighted_gap',
        '{a} * {p} - {b} * {q}',
        '{t} = {b} * {q}',
        'return {a} * {p} - {t}',
    ),
    _t(
        'two_parts',
        '{a} // {p} + {a} % {p}',
        '{t} = {a} // {p}',
        'return {t} + {a} % {p}',
        high=15,
    ),
    _t(
        'largest',
        'max({a}, {b})',
        'if {a} > {b}:',
        '  return {a}',
        'return {b}',
    ),
    _t(
        'smallest',
        'min({a}, {b})',
        'if {a} < {b}:',
        '  return {a}',
        'return {b}',
    ),
    _t(
        'capped',
        'min({a} + {b}, {p})',
        '{t} = {a} + {b}',
        'if {t} > {p}:',
        '  return {p}',
        'return {t}',
    ),
    _t(
        'raised',
        'max({a} - {b}, {p})',
        '{t} = {a} - {b}',
        'if {t} < {p}:',
        '  return {p}',
        'return {t}',
    ),
    _t(
        'distance',
        'abs({a} - {b})',
        'if {a} > {b}:',
        '  return {a} - {b}',
        'return {b} - {a}',
    ),
    _t(
        'bonus',
        '{a} + {p} if {a} > {b} else {a}',
        'if {a} > {b}:',
        '  return {a} + {p}',
        'return {a}',
    ),
    _t(
        'fine',
        '{b} - {p} if {a} < {b} else {a}',
        'if {a} < {b}:',
        '  return {b} - {p}',
        'return {a}',
    ),
    _t(
        'either',
        '{a} + {b} if {a} > {p} else {a} * {b}',
        'if {a} > {p}:',
        '  return {a} + {b}',
        'return {a} * {b}',
    ),
    _t(
        'same',
        '{p} if {a} == {b} else {q}',
        'if {a} == {b}:',
        '  return {p}',
        'return {q}',
    ),
    _t(
        'remainder_switch',
        '{b} if {a} % {p} == 1 else {a}',
        'if {a} % {p} == 1:',
        '  return {b}',
        'return {a}',
    ),
    _t(
        'sum_below',
        '{p} + sum(range({a}))',
        '{t} = {p}',
        'for {i} in range({a}):',
        '  {t} = {t} + {i}',
        'return {t}',
    ),
    _t(
        'sum_scaled',
        '{p} + {a} * {b}',
        '{t} = {p}',
        'for {i} in range({a}):',
        '  {t} = {t} + {b}',
        'return {t}',
    ),
    _t(
        'lifted_gap',
        '({a} + {p}) * {q} - {b}',
        '{t} = ({a} + {p}) * {q}',
        'return {t} - {b}',
    ),
)
TEMPLATE_BY_NAME = {t.name: t for t in TEMPLATES}
