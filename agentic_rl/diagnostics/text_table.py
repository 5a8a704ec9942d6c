"""Tables in text, whose columns are as wide as what they hold."""

from __future__ import annotations

from typing import Sequence


def lines(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
  """Returns a line for each row.

  Args:
    rows: cells, equally many in each; the first row is the head.
    left: so many columns are flush left, those after them flush right.
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  out = []
  for row in rows:
    cells = [
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths))
    ]
    out.append('  '.join(cells).rstrip())
  return out
