"""Sums of a fixed order in TPU kernels, where a register is 8 by 128 numbers.

Along the lanes every step of a halving tree is a rotation. A block is turned
once instead: then whole registers are added, and the bits are those of
`Numerics.tree_sum`.
"""

from __future__ import annotations

import jax.numpy as jnp

LANES = 128  # of a register; the unit of the last dimension of a block
SUBLANES = 8  # the unit of the last dimension but one, of float32


def round_up(n: int, multiple: int) -> int:
  """Returns the least multiple of `multiple` that is not below n."""
  return -(-n // multiple) * multiple


def power_of_two(n: int) -> int:
  """Returns the least power of two that is not below n."""
  return 1 << (n - 1).bit_length()


def tree_add(parts):
  """Adds arrays in the order of `tree_sum`; zeros are not added.

  Args:
    parts: arrays of one shape, at least one.

  Returns:
    Their sum.
  """
  half = power_of_two(len(parts))
  while half > 1:
    half //= 2
    front, back = parts[:half], parts[half:]
    parts = [a + b for a, b in zip(front, back)] + front[len(back) :]
  return parts[0]


def fold(x):
  """Halves x [..., n] by adds until at most one register's lanes are left.

  Args:
    x: n a power of two.

  Returns:
    [..., min(n, LANES)], the first steps of `tree_sum`.
  """
  size = x.shape[-1]
  while size > LANES:
    size //= 2
    x = x[..., :size] + x[..., size:]
  return x


def row_sums(x, numerics):
  """Sums rows, with the bits of `numerics.tree_sum`.

  Args:
    x: float32 [R, n].
    numerics: summation rules.

  Returns:
    [1, R], a lane for each row; see `column`.
  """
  if not numerics.exact:
    return x.T.sum(0, keepdims=True)
  count, n = x.shape
  size = power_of_two(n)
  if size != n:
    x = jnp.concatenate([x, jnp.zeros((count, size - n), x.dtype)], -1)
  x = fold(x).T
  while x.shape[0] > 1:
    half = x.shape[0] // 2
    x = x[:half] + x[half:]
  return x


def column(row, width: int = 1):
  """Turns a number for each lane into one for each row.

  Args:
    row: [1, R].
    width: columns that the result will meet.

  Returns:
    [R, width] equal columns, or [R, 1] above `LANES`.
  """
  height = min(max(width, SUBLANES), LANES)
  columns = jnp.broadcast_to(row, (height, row.shape[1])).T
  return columns[:, : width if width <= LANES else 1]
