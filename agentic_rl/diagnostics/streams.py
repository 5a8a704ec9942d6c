"""Sequences in pages, and the streams in which attention may meet them.

The same queries, keys and values, laid out as the engine does it (chunks of any
size and order, pages anywhere in the pool) and as the learner does it (packed
rows). What belongs to nobody is NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import layout as layouts

TILE = layouts.QUERY_TILE

Place = tuple[int, int]  # of a token: sequence and position
Chunk = tuple[int, int, int]  # sequence, first position, count


@dataclasses.dataclass(frozen=True)
class World:
  """Queries, keys and values of some sequences, one array for each.

  Attributes:
    page: C, tokens of a page.
    lengths: tokens of each sequence.
    q: [n, N, H] of each.
    kv: [n, K, 2H] of each.
  """

  page: int
  lengths: tuple[int, ...]
  q: list[np.ndarray]
  kv: list[np.ndarray]


def pool(data: World, seed: int = 0, pages: int = 24):
  """Returns (kv, page table) with permuted pages, NaN wherever unwritten."""
  size, longest = data.page, -(-max(data.lengths) // data.page)
  kv = np.full((pages, size, *data.kv[0].shape[1:]), np.nan, data.kv[0].dtype)
  free = iter(np.random.default_rng(seed).permutation(pages - 1))
  table = np.full((len(data.lengths), longest), pages - 1, np.int32)
  for s, n in enumerate(data.lengths):
    for w in range(-(-n // size)):
      table[s, w] = next(free)
      rows = data.kv[s][w * size : (w + 1) * size]
      kv[table[s, w], : len(rows)] = rows
  return kv, table


def stream(
    data: World, table, chunks: Sequence[Chunk], tokens: int, tiles: int
):
  """Lays chunks into a stream with NaN padding, as the engine does.

  Args:
    data: the sequences.
    table: from `pool`.
    chunks: what the stream holds, in its order.
    tokens: of the stream.
    tiles: query tiles of the stream.

  Returns:
    (q, layout, place), place[i] = (sequence, position) of the i-th token.
  """
  q = np.full((tokens, *data.q[0].shape[1:]), np.nan, data.q[0].dtype)
  positions, sequences = np.zeros((2, tokens), np.int32)
  lanes = np.full((tiles, TILE), tokens, np.int32)
  flat = np.full(tokens, tiles * TILE, np.int32)
  place: list[Place] = []
  lane, i = -1, 0
  for s, start, count in chunks:
    for position in range(start, start + count):
      if position == start or position % TILE == 0:
        lane += 1
      q[i], positions[i], sequences[i] = data.q[s][position], position, s
      lanes[lane, position % TILE] = i
      flat[i] = lane * TILE + position % TILE
      place.append((s, position))
      i += 1
  layout = layouts.Layout(*map(jnp.asarray, (positions, sequences, table)))
  layout = dataclasses.replace(
      layout, tiles=jnp.asarray(lanes), tile_place_T=jnp.asarray(flat)
  )
  return jnp.asarray(q), layout, place


def whole(data: World) -> list[Chunk]:
  """Chunks that read every sequence at once."""
  return [(s, 0, n) for s, n in enumerate(data.lengths)]


def pieces(data: World, seed: int) -> list[Chunk]:
  """Chunks of 1 to 11 tokens in random order."""
  rng = np.random.default_rng(seed)
  out: list[Chunk] = []
  for s, n in enumerate(data.lengths):
    at = 0
    while at < n:
      count = min(int(rng.integers(1, 12)), n - at)
      out.append((s, at, count))
      at += count
  return [out[i] for i in rng.permutation(len(out))]


def packed(
    data: World, rows: Sequence[Sequence[int]], length: int, fill: float = 0.0
):
  """Packs sequences into rows, each at a page boundary, as the learner does.

  Args:
    data: the sequences.
    rows: for each row the sequences in it.
    length: tokens of a row.
    fill: value of all padding.

  Returns:
    (q, kv pages, layout, place), place[i] = (sequence, position) or None.
  """
  size = data.page
  q, kv = (
      np.full((len(rows), length, *x[0].shape[1:]), fill, x[0].dtype)
      for x in (data.q, data.kv)
  )
  positions = np.zeros((len(rows), length), np.int32)
  place: list[Place | None] = [None] * (len(rows) * length)
  for r, row in enumerate(rows):
    at = 0
    for s in row:
      n = data.lengths[s]
      end = at + -(-n // size) * size
      positions[r, at:end] = np.arange(end - at)
      q[r, at : at + n], kv[r, at : at + n] = data.q[s], data.kv[s]
      for i in range(n):
        place[r * length + at + i] = (s, i)
      at = end
    positions[r, at:] = np.arange(length - at)
  layout = layouts.row_layout(jnp.asarray(positions), size)
  return (
      jnp.asarray(q.reshape(-1, *q.shape[2:])),
      jnp.asarray(kv.reshape(-1, size, *kv.shape[2:])),
      layout,
      place,
  )


def by_place(out: jax.Array, place: Sequence[Place | None]) -> dict[Place, Any]:
  """Returns the row of each token."""
  rows = np.asarray(out)
  return {p: rows[i] for i, p in enumerate(place) if p is not None}
