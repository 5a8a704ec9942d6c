"""What equality to the bit means, and how a program is searched for breaches.

The rules themselves live in `kernels_pallas.numerics`. Here are the two checks
that hold them: a lint over the text of a lowered program, and the count of bits
that differ between what the sampler recorded and what the learner computed.
"""

from __future__ import annotations

import re

import numpy as np

_OPS = (
    'reduce',
    'reduce_window',
    'scatter',
    'select_and_scatter',
    'all_reduce',
    'reduce_scatter',
)
_OP = re.compile(r'"?stablehlo\.(' + '|'.join(_OPS) + r')\b"?\s*\(')
_APPLIES = re.compile(r'\bapplies stablehlo\.(add|multiply)\b')
_BODY = re.compile(r'stablehlo\.(?:add|multiply)\b.*:.*tensor<(?:b?f|complex)')
_FLOAT = re.compile(r'tensor<(?:[0-9?]+x)*(?:b?f[0-9]|complex)')
_QUOTED = re.compile(r'"[^"]*"')


def order_sensitive_reductions(lowered_text: str) -> list[str]:
  """Finds the float sums and products whose order XLA is free to choose.

  Reported are reductions, windowed reductions (as in `cumsum`), scatters and
  reductions across devices that add or multiply floats. Maxima, integers and
  matrix products are not: their order is free of consequence, or fixed by the
  tiles.

  Args:
    lowered_text: StableHLO, from `jax.jit(f).lower(...).as_text()`.

  Returns:
    The first line of each such operation, in the order of the text; empty if
    the program holds the rules.

  Raises:
    ValueError: if the text is no StableHLO module.
  """
  if 'module' not in lowered_text or 'func.func' not in lowered_text:
    raise ValueError(
        f'lowered_text={lowered_text[:60]!r}: expected a StableHLO module'
    )
  lines, found = lowered_text.splitlines(), []
  for i, line in enumerate(lines):
    if not _OP.search(line):
      continue
    if _APPLIES.search(line):
      bad = bool(_FLOAT.search(line[line.rindex(' : ') :]))
    else:
      bad = any(_BODY.search(inner) for inner in _region(lines, i))
    if bad:
      found.append(line.strip())
  return found


def _region(lines: list[str], start: int) -> list[str]:
  """Returns the lines of the braces that the operation at `start` opens."""
  depth, body = 0, []
  for i in range(start, len(lines)):
    line = _QUOTED.sub('', lines[i])
    depth += line.count('{') - line.count('}')
    if i > start:
      body.append(lines[i])
      if depth <= 0:
        break
  return body


def unequal_bits(a, b) -> int:
  """Counts the elements of two float arrays whose bits differ.

  A NaN equals a NaN of the same bits, and -0.0 differs from 0.0.

  Args:
    a: float array of any shape.
    b: float array of the same shape and dtype.

  Returns:
    The number of elements (not of single bits) that are unequal.

  Raises:
    ValueError: if the two differ in shape or dtype, or hold no floats.
  """
  a, b = np.asarray(a), np.asarray(b)
  if a.shape != b.shape or a.dtype != b.dtype:
    raise ValueError(
        f'a {a.dtype}{list(a.shape)} and b {b.dtype}{list(b.shape)}: shape and'
        ' dtype must be equal'
    )
  # bfloat16 and the 8-bit floats are kind 'V' to NumPy.
  if a.dtype.kind not in 'fV' or a.dtype.itemsize not in (1, 2, 4, 8):
    raise ValueError(f'a and b of dtype {a.dtype}: floats are needed')
  bits = np.dtype(f'u{a.dtype.itemsize}')
  a, b = (np.ascontiguousarray(x).reshape(-1).view(bits) for x in (a, b))
  return int((a != b).sum())
