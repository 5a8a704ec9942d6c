"""What commands that report have in common: files, messages, exit codes."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any, Callable

from configs import common


def note(text: str) -> None:
  """Tells how far the work is, on standard error."""
  print(text, file=sys.stderr, flush=True)


def add_flag(parser: argparse.ArgumentParser) -> None:
  """Adds `--json`."""
  parser.add_argument(
      '--json',
      default='',
      metavar='FILE',
      help="write the report, '-' for standard output",
  )


def run(work: Callable[[], tuple[Any, str, bool]], json_path: str) -> int:
  """Does the work of a command and writes its report.

  Args:
    work: returns the report, the text for people, and whether what was checked
      holds.
    json_path: where the report goes; '' for nowhere, '-' for standard output
      in place of the text.

  Returns:
    The exit code: 0, 1 if it does not hold, 2 on bad input, told in one line.
  """
  try:
    check_writable(json_path)
    report, text, holds = work()
  except (OSError, ValueError, common.ConfigError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  content = json.dumps(report, indent=2)
  if json_path not in ('', '-'):
    pathlib.Path(json_path).write_text(content + '\n', encoding='utf-8')
  print(content if json_path == '-' else text)
  return 0 if holds else 1


def check_writable(path: str) -> None:
  """Checks, before the work, that a report can be written to a file.

  Args:
    path: of the file; '' for none, '-' for standard output.

  Raises:
    OSError: it can not.
  """
  if path not in ('', '-'):
    new = not pathlib.Path(path).exists()
    with open(path, 'a', encoding='utf-8'):
      pass
    if new:  # nothing is left behind if the work fails
      pathlib.Path(path).unlink()
