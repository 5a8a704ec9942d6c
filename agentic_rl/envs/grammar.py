"""The parser of tool calls, the only one: training and evaluation share it.

  test                  runs the visible tests
  list                  names the files
  view FILE             prints a file with line numbers
  edit FILE LINE TEXT   replaces a line; the old line's indentation stays
  submit                ends the episode

Anything else is a `Malformed` whose reason is short and depends on the text
alone, so that it can be shown to the agent as an observation.
"""

from __future__ import annotations

import dataclasses

MAX_ACTION_CHARS = 2000
_MAX_LINE_DIGITS = 6
_SHOWN_CHARS = 16
# Number of arguments of each tool.
TOOLS = {'test': 0, 'list': 0, 'view': 1, 'edit': 3, 'submit': 0}
_USAGE = {
    'test': 'test takes no arguments',
    'list': 'list takes no arguments',
    'view': 'view takes FILE',
    'edit': 'edit takes FILE LINE TEXT',
    'submit': 'submit takes no arguments',
}


@dataclasses.dataclass(frozen=True)
class Call:
  """A well-formed call; the line number of `edit` is an int."""

  name: str
  args: tuple[str | int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Malformed:
  """A text that is no call, and why, in a few words."""

  reason: str


def parse(text: str) -> Call | Malformed:
  """Parses the text of one action. Never raises."""
  if not isinstance(text, str):
    return Malformed('action is not text')
  if len(text) > MAX_ACTION_CHARS:
    return Malformed('action too long')
  text = text.strip(' \t\n\r')
  if not text:
    return Malformed('empty action')
  if not _is_one_plain_line(text):
    return Malformed('action is not one line of text')
  name, _, rest = text.replace('\t', ' ').partition(' ')
  if name not in TOOLS:
    return Malformed(f'unknown tool {shown(name)}')
  rest = text[len(name) :].strip(' \t')
  # Only the last argument of `edit` may hold spaces.
  args = rest.split(None, 2) if name == 'edit' else rest.split()
  if len(args) != TOOLS[name]:
    return Malformed(_USAGE[name])
  if name != 'edit':
    return Call(name, tuple(args))
  file, number, new = args
  if not (number.isascii() and number.isdigit()):
    return Malformed(f'bad line number {shown(number)}')
  if len(number) > _MAX_LINE_DIGITS:
    return Malformed('bad line number')
  return Call('edit', (file, int(number), new))


def render(call: Call) -> str:
  """Returns the canonical text of a call: `parse(render(call)) == call`."""
  return ' '.join([call.name, *map(str, call.args)])


def shown(text: str) -> str:
  """Quotes what the agent wrote, in few printable ASCII characters."""
  kept = ''.join(c if ' ' < c <= '~' and c != "'" else '?' for c in text)
  return f"'{kept[:_SHOWN_CHARS]}'"


def _is_one_plain_line(text: str) -> bool:
  if any((ord(c) < 32 and c != '\t') or ord(c) == 127 for c in text):
    return False
  # Lone surrogates have no UTF-8; the rest are lines to `str.splitlines`.
  return not any(
      '\ud800' <= c <= '\udfff' or c in '\x85\u2028\u2029' for c in text
  )
