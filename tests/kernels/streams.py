"""Sequences in pages, and the streams in which they may be computed."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kernels_pallas.paged_attention import layout as layouts
from tests.kernels import samples

PAGE, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 8
TILE = layouts.QUERY_TILE
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5)
PAGES = 4  # of the longest sequence


@dataclasses.dataclass
class World:
  """Queries, keys and values of some sequences, one array for each."""

  lengths: tuple[int, ...]
  q: list[np.ndarray]
  kv: list[np.ndarray]


def world(dtype='float32', lengths=LENGTHS, seed=0):
  def make(offset, n, heads, width):
    shape = (n, heads, width)
    return np.array(samples.normal(seed + offset, shape, dtype))

  return World(
      lengths,
      [make(2 * i, n, HEADS, WIDTH) for i, n in enumerate(lengths)],
      [make(2 * i + 1, n, KV_HEADS, 2 * WIDTH) for i, n in enumerate(lengths)],
  )


def pool(data, seed=0, pages=24):
  """Returns (kv, page table) with permuted pages, NaN wherever unwritten."""
  kv = np.full((pages, PAGE, KV_HEADS, 2 * WIDTH), np.nan, np.float32)
  free = iter(np.random.default_rng(seed).permutation(pages - 1))
  table = np.full((len(data.lengths), PAGES), pages - 1, np.int32)
  for s, n in enumerate(data.lengths):
    for w in range(-(-n // PAGE)):
      table[s, w] = next(free)
      rows = data.kv[s][w * PAGE : (w + 1) * PAGE]
      kv[table[s, w], : len(rows)] = rows
  return kv, table


def stream(data, table, chunks, tokens, tiles):
  """Lays chunks (sequence, start, count) into a stream with NaN padding.

  Returns:
    (q, layout, place), place[i] = (sequence, position) of the i-th token.
  """
  q = np.full((tokens, HEADS, WIDTH), np.nan, np.float32)
  positions, sequences = np.zeros((2, tokens), np.int32)
  lanes = np.full((tiles, TILE), tokens, np.int32)
  flat = np.full(tokens, tiles * TILE, np.int32)
  place, lane, i = [], -1, 0
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


def whole(data):
  """Chunks that read every sequence at once."""
  return [(s, 0, n) for s, n in enumerate(data.lengths)]


def pieces(data, seed):
  """Chunks of 1 to 11 tokens in random order."""
  rng, out = np.random.default_rng(seed), []
  for s, n in enumerate(data.lengths):
    at = 0
    while at < n:
      count = min(int(rng.integers(1, 12)), n - at)
      out.append((s, at, count))
      at += count
  return [out[i] for i in rng.permutation(len(out))]


def packed(data, rows, length, fill=0.0):
  """Packs sequences into rows, each at a page boundary.

  Args:
    data: the sequences.
    rows: for each row the sequences in it.
    length: tokens of a row.
    fill: value of all padding.

  Returns:
    (q, kv pages, layout, place), place[i] = (sequence, position) or None.
  """
  q = np.full((len(rows), length, HEADS, WIDTH), fill, np.float32)
  kv = np.full((len(rows), length, KV_HEADS, 2 * WIDTH), fill, np.float32)
  positions = np.zeros((len(rows), length), np.int32)
  place = [None] * (len(rows) * length)
  for r, row in enumerate(rows):
    at = 0
    for s in row:
      n = data.lengths[s]
      end = at + -(-n // PAGE) * PAGE
      positions[r, at:end] = np.arange(end - at)
      q[r, at : at + n], kv[r, at : at + n] = data.q[s], data.kv[s]
      for i in range(n):
        place[r * length + at + i] = (s, i)
      at = end
    positions[r, at:] = np.arange(length - at)
  layout = layouts.row_layout(jnp.asarray(positions), PAGE)
  return (
      jnp.asarray(q.reshape(-1, HEADS, WIDTH)),
      jnp.asarray(kv.reshape(-1, PAGE, KV_HEADS, 2 * WIDTH)),
      layout,
      place,
  )


def by_place(out, place):
  """Returns {(sequence, position): row}."""
  out = np.asarray(out)
  return {p: out[i] for i, p in enumerate(place) if p is not None}
