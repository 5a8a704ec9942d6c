"""Which pages a tile of queries reads: the lists that the kernels walk."""

from __future__ import annotations

import jax.numpy as jnp

from kernels_pallas.paged_attention.layout import to_tiles


def visits(selected, layout, positions, current, page, form):
  """Lists the pages each tile visits, ascending, the current page last.

  Args:
    selected: int32 [T, K, j], selected pages, or None.
    layout: of the stream.
    positions: int32 [tiles, tile], -1 in empty lanes.
    current: int32 [tiles], the current page.
    page: C.
    form: window and sink page.

  Returns:
    count int32 [tiles, K or 1], 0 for an empty tile, and page numbers int32
    [tiles, K or 1, capacity]; entries past the count repeat the current page.
  """
  tile, pages = positions.shape[1], layout.page_table_SW.shape[1]
  last = current[:, None, None]
  if selected is None:
    first = jnp.zeros_like(last)
    capacity = pages
    if form.window is not None:
      lowest = jnp.min(jnp.where(positions >= 0, positions, 1 << 30), 1)
      lowest = jnp.minimum(lowest, current * page)[:, None, None]
      first = jnp.maximum(lowest - form.window + 1, 0) // page
      capacity = min(pages, (form.window + page - 2) // page + 1)
    numbers = jnp.minimum(first + jnp.arange(capacity), last)
    count = (last - first)[..., 0] + 1
    if form.window is not None and form.sink_page:
      # Page 0 comes first, unless the window reaches it.
      front = jnp.pad(numbers, [(0, 0), (0, 0), (1, 0)])
      back = jnp.concatenate([numbers, last], -1)
      numbers = jnp.where(first > 0, front, back)
      count += first[..., 0] > 0
  else:
    nothing = jnp.int32(1 << 30)
    chosen = to_tiles(selected, layout, fill=-1, tile=tile)
    live = (positions >= 0)[:, :, None, None] & (chosen >= 0)
    live &= chosen != current[:, None, None, None]
    chosen = jnp.where(live, chosen, nothing).transpose(0, 2, 1, 3)
    chosen = jnp.sort(chosen.reshape(*chosen.shape[:2], -1), -1)
    before = jnp.pad(
        chosen[..., :-1], [(0, 0), (0, 0), (1, 0)], constant_values=-1
    )
    chosen = jnp.sort(jnp.where(chosen == before, nothing, chosen), -1)
    chosen = chosen[..., : min(pages, chosen.shape[-1])]
    count = (chosen < nothing).astype(jnp.int32).sum(-1) + 1
    chosen = jnp.pad(chosen, [(0, 0), (0, 0), (0, 1)], constant_values=1 << 30)
    numbers = jnp.where(chosen < nothing, chosen, last)
  count = jnp.where((positions >= 0).any(1)[:, None], count, 0)
  return count.astype(jnp.int32), numbers.astype(jnp.int32)
