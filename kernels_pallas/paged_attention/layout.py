"""Where the tokens of a stream stand: positions, page table and query tiles."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

QUERY_TILE = 8  # positions that are computed together, aligned to multiples


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        'positions_T',
        'sequences_T',
        'page_table_SW',
        'tiles',
        'tile_place_T',
        'key_starts_BS',
    ],
    meta_fields=['row_length'],
)
@dataclasses.dataclass(frozen=True)
class Layout:
  """Where the tokens of a stream stand; made by the engine or the learner.

  Attributes:
    positions_T: int32, position of each token in its sequence.
    sequences_T: int32, the token's row in the page table.
    page_table_SW: int32, the pool page that holds page w of sequence s.
    tiles: int32 [tiles, QUERY_TILE], stream index of the token at lane
      position % QUERY_TILE, or T where the lane is empty. None if the stream
      itself is in tile order (the learner).
    tile_place_T: int32, flat place of each token in `tiles`; out of range for
      tokens in no tile (padding). None with `tiles`.
    row_length: of the learner: the stream is rows of so many tokens, the pool
      is the stream itself, and gradients are defined. None in the engine.
    key_starts_BS: of a learner whose rows are cut among devices: the pool is
      rows of keys that end with the stream's own, and this is the place in its
      row where each key's sequence begins, int32 (negative if before the row).
      None elsewhere.
  """

  positions_T: jax.Array
  sequences_T: jax.Array
  page_table_SW: jax.Array
  tiles: jax.Array | None = None
  tile_place_T: jax.Array | None = None
  row_length: int | None = None
  key_starts_BS: jax.Array | None = None

  def of_pool(self) -> Layout:
    """Returns the layout for the forward, whose pool is not the stream."""
    if self.key_starts_BS is None:
      return self
    return dataclasses.replace(self, row_length=None, key_starts_BS=None)

  def shift_pages(self, by) -> Layout:
    """Returns the layout for the slice of a stacked pool that starts at `by`."""
    return dataclasses.replace(self, page_table_SW=self.page_table_SW + by)


def row_layout(positions_BT, page_size: int) -> Layout:
  """Layout of packed rows: every sequence starts on a page boundary.

  Args:
    positions_BT: int32 [B, T], 0 at each sequence's first token and rising by
      one; T a multiple of page_size.
    page_size: C, a multiple of QUERY_TILE.

  Returns:
    The layout whose page pool is the stream cut into pages.

  Raises:
    ValueError: if rows are not whole pages or pages not whole tiles.
  """
  if positions_BT.ndim != 2:
    raise ValueError(f'positions_BT {positions_BT.shape}: expected [B, T]')
  rows, length = positions_BT.shape
  if page_size < 1 or page_size % QUERY_TILE or length % page_size:
    raise ValueError(
        f'positions_BT {positions_BT.shape}, page_size={page_size}: rows must'
        f' be whole pages and pages whole tiles of {QUERY_TILE}'
    )
  positions_T = positions_BT.reshape(-1)
  pages = rows * length // page_size
  first = (jnp.arange(rows * length) - positions_T) // page_size
  table = jnp.arange(pages)[:, None] + jnp.arange(length // page_size)
  return Layout(
      positions_T,
      first.astype(jnp.int32),
      jnp.minimum(table, pages - 1).astype(jnp.int32),
      row_length=length,
  )


def part_layout(positions_BT, page_size: int, part, parts: int, past: int):
  """Layout of one of `parts` equal parts of packed rows.

  The keys of a row are the `past` tokens before the part and then its own; what
  would lie before the row's first token is taken from its end, and no query
  sees it.

  Args:
    positions_BT: int32 [B, T] of the whole rows, as for `row_layout`.
    page_size: C.
    part: int32 scalar, which part; may be traced.
    parts: number of parts; a part is whole pages.
    past: tokens of keys before the part, whole pages, at most (parts-1)·T/parts.

  Returns:
    The layout of the part's stream [B·T/parts] over a pool of
    B·(past + T/parts) / C pages.

  Raises:
    ValueError: if a part, or `past`, is no whole number of pages.
  """
  rows, length = positions_BT.shape
  own = length // parts
  if length % parts or own % page_size or past % page_size:
    raise ValueError(
        f'positions_BT {positions_BT.shape}, parts={parts}, past={past}: parts'
        f' of whole pages of {page_size} are needed'
    )
  if not 0 <= past <= length - own:
    raise ValueError(f'past={past}: allowed is 0..{length - own}')
  size = past + own
  place = jnp.arange(size)
  positions_BS = positions_BT[:, (part * own - past + place) % length]
  starts_BS = place - positions_BS
  first = starts_BS[:, past::page_size] // page_size  # a page has one sequence
  table = first.reshape(-1)[:, None] + jnp.arange(length // page_size)
  row = jnp.repeat(jnp.arange(rows), own // page_size)[:, None]
  pages = size // page_size
  table = row * pages + jnp.clip(table, 0, pages - 1)
  return Layout(
      positions_BS[:, past:].reshape(-1),
      jnp.arange(rows * own) // page_size,
      table.astype(jnp.int32),
      row_length=own,
      key_starts_BS=starts_BS,
  )


def to_tiles(x_T, layout: Layout, fill=0, tile: int = QUERY_TILE):
  """Returns [tiles, tile, ...], the stream in tile order.

  Args:
    x_T: [T, ...].
    layout: of the stream.
    fill: value of empty lanes.
    tile: tokens of a tile; of the learner's rows, any divisor of the page.
  """
  if layout.tiles is None:
    return x_T.reshape(-1, tile, *x_T.shape[1:])
  return x_T.at[layout.tiles].get(mode='fill', fill_value=fill)


def from_tiles(x_tR, layout: Layout):
  """Inverse of `to_tiles`; rows in no tile are zero."""
  flat = x_tR.reshape(-1, *x_tR.shape[2:])
  if layout.tiles is None:
    return flat
  return flat.at[layout.tile_place_T].get(mode='fill', fill_value=0)


def tile_facts(layout: Layout, page_size: int, tile: int = QUERY_TILE):
  """Returns what the lanes of each tile have in common.

  Returns:
    positions [tiles, tile], -1 in empty lanes; page-table rows [tiles, W]; the
    current page [tiles].
  """
  positions = to_tiles(layout.positions_T, layout, fill=-1, tile=tile)
  rows = to_tiles(layout.sequences_T, layout, tile=tile).max(-1)
  current = jnp.maximum(positions.max(-1), 0) // page_size
  return positions, layout.page_table_SW[rows], current
