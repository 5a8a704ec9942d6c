"""Packs sequences into rows: tokens stay what they were, padding trains nothing.

Stands between credit and the update. A row holds whole sequences, each on a
page boundary, so that the learner's pages are the stream itself. Place t of a
row carries the input token t and what is known of the token that follows it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Sequence

import numpy as np

from agentic_rl import types

# Fields whose empty value is -1.
_UNKNOWN = ('segments_BT', 'routes_BTLk', 'support_BTk')


@dataclasses.dataclass(frozen=True)
class Example:
  """One sequence to learn from; every array is per token [T].

  Attributes:
    tokens: int32, the sequence.
    weights: float32, loss weight of the token as a target.
    advantages: float32, advantage of the action that owns the token.
    logp_behavior: float32, log-prob recorded when it was drawn.
    sampled: bool, whether the policy drew it.
    routes: int16 [T, L_moe, topk], or None; with weights as in
      `types.Trajectory`.
    support: int32 [T, k], what each token was drawn among, or None.
  """

  tokens: np.ndarray
  weights: np.ndarray
  advantages: np.ndarray
  logp_behavior: np.ndarray
  sampled: np.ndarray
  routes: np.ndarray | None = None
  support: np.ndarray | None = None


def from_trajectory(
    trajectory: types.Trajectory, advantages: np.ndarray
) -> Example:
  """Returns the example of a trajectory: only drawn tokens have a loss.

  Args:
    trajectory: finished, not failed.
    advantages: float32 [A], one per action.

  Raises:
    ValueError: if the advantages do not match the actions.
  """
  if len(advantages) != len(trajectory.turns):
    raise ValueError(
        f'{len(advantages)} advantages for {len(trajectory.turns)} actions of'
        f' rollout {trajectory.rollout_id}'
    )
  spread = np.zeros(len(trajectory.tokens), np.float32)
  for turn, advantage in zip(trajectory.turns, advantages):
    spread[turn.action.start : turn.action.end] = advantage
  return Example(
      trajectory.tokens,
      trajectory.sampled.astype(np.float32),
      spread,
      trajectory.logp_behavior,
      trajectory.sampled,
      trajectory.routes,
      trajectory.support,
  )


def from_text(tokens: np.ndarray, weights: np.ndarray) -> Example:
  """Returns the example of supervised tokens with a loss weight each."""
  zeros = np.zeros(len(tokens), np.float32)
  return Example(tokens, weights, zeros, zeros, zeros.astype(bool))


def pack(
    examples: Sequence[Example], *, row_tokens: int, page: int, rows: int
) -> types.Batch:
  """Lays examples into rows, longest first, each into the first that fits.

  Args:
    examples: sequences of at most row_tokens tokens.
    row_tokens: T, a multiple of page.
    page: alignment of each sequence.
    rows: B is rounded up to a multiple of this.

  Returns:
    The batch; weights[t] belongs to the token that follows place t, so the
    first token of a sequence has no loss.

  Raises:
    ValueError: if a sequence is longer than a row, or only some routes have
      weights.
  """
  places, count = _places([len(e.tokens) for e in examples], row_tokens, page)
  count = max(rows, -(-count // rows) * rows)
  shape = (count, row_tokens)
  first = next((e.routes for e in examples if e.routes is not None), None)
  kinds = {e.routes.dtype for e in examples if e.routes is not None}
  if len(kinds) > 1:
    raise ValueError(f'routes of {kinds}: all or none must have weights')
  among = next((e.support for e in examples if e.support is not None), None)
  batch = types.Batch(
      tokens_BT=np.zeros(shape, np.int32),
      targets_BT=np.zeros(shape, np.int32),
      # Padding: each page is a sequence of its own.
      positions_BT=np.tile(np.arange(row_tokens) % page, (count, 1)).astype(
          np.int32
      ),
      segments_BT=np.full(shape, -1, np.int32),
      weights_BT=np.zeros(shape, np.float32),
      advantages_BT=np.zeros(shape, np.float32),
      logp_behavior_BT=np.zeros(shape, np.float32),
      sampled_BT=np.zeros(shape, bool),
      routes_BTLk=None
      if first is None
      else np.full(shape + first.shape[1:], -1, first.dtype),
      support_BTk=None
      if among is None
      else np.full(shape + among.shape[1:], -1, np.int32),
  )
  for number, (example, (row, start)) in enumerate(zip(examples, places)):
    n = len(example.tokens)
    here, ahead = slice(start, start + n), slice(start, start + n - 1)
    until = min(row_tokens, start + -(-n // page) * page)
    batch.tokens_BT[row, here] = example.tokens
    batch.positions_BT[row, start:until] = np.arange(until - start)
    batch.segments_BT[row, here] = number
    batch.targets_BT[row, ahead] = example.tokens[1:]
    batch.weights_BT[row, ahead] = example.weights[1:]
    batch.advantages_BT[row, ahead] = example.advantages[1:]
    batch.logp_behavior_BT[row, ahead] = example.logp_behavior[1:]
    batch.sampled_BT[row, ahead] = example.sampled[1:]
    if batch.routes_BTLk is not None and example.routes is not None:
      batch.routes_BTLk[row, here] = example.routes
    if batch.support_BTk is not None and example.support is not None:
      batch.support_BTk[row, ahead] = example.support[1:]
  return batch


def _places(lengths, row_tokens: int, page: int):
  """Returns (row, start) per sequence and the number of rows."""
  free: list[int] = []
  places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  for i in order:
    need = -(-lengths[i] // page) * page
    if need > row_tokens:
      raise ValueError(
          f'a sequence of {lengths[i]} tokens: rows hold {row_tokens}'
      )
    row = next((r for r, left in enumerate(free) if left >= need), None)
    if row is None:
      row = len(free)
      free.append(row_tokens)
    places[i] = row, row_tokens - free[row]
    free[row] -= need
  return places, len(free)


def take_rows(batch: types.Batch, rows) -> types.Batch:
  """Returns the batch of some rows: a slice or an index array."""
  cut: dict[str, Any] = {}
  for field in dataclasses.fields(batch):
    value = getattr(batch, field.name)
    cut[field.name] = None if value is None else value[rows]
  return types.Batch(**cut)


def microbatches(batch: types.Batch, rows: int) -> Iterable[types.Batch]:
  """Cuts a batch into batches of `rows` rows; empty ones are left out.

  The last one is filled up with empty rows.
  """
  used = np.flatnonzero((batch.segments_BT >= 0).any(1))
  for lo in range(0, len(used), rows):
    part = take_rows(batch, used[lo : lo + rows])
    yield _fill(part, rows - len(part.tokens_BT))


def _fill(batch: types.Batch, missing: int) -> types.Batch:
  """Appends empty rows."""
  cut: dict[str, Any] = {}
  for field in dataclasses.fields(batch):
    value = getattr(batch, field.name)
    if value is not None:
      blank = -1 if field.name in _UNKNOWN else 0
      rest = np.full((missing, *value.shape[1:]), blank, value.dtype)
      value = np.concatenate([value, rest])
    cut[field.name] = value
  return types.Batch(**cut)
