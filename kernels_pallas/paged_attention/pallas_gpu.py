"""Paged attention for Hopper GPUs: one kernel for decode, prefill and learner.

A block computes a tile of tokens of one sequence for one KV head. Its rows,
tokens x G query heads, are shared out to warpgroups of 64 rows, the height of
an instruction; one more warpgroup brings the pages of the tile's list, K and V
at once, through a ring in shared memory. Every page is one step of the online
softmax, in the order of position, and an exact no-op for a row that does not
see it: the height of a tile and the neighbours in it change no bit of a row.
Only the current page, always the last, and windows need a mask per element.

The arithmetic is that of the TPU kernels. Source of the online softmax:
arXiv:2205.14135.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import numerics as nx
from kernels_pallas import warpgroup
from kernels_pallas.paged_attention.layout import QUERY_TILE
from kernels_pallas.paged_attention.layout import from_tiles
from kernels_pallas.paged_attention.layout import tile_facts
from kernels_pallas.paged_attention.layout import to_tiles
from kernels_pallas.paged_attention.visits import visits

ROWS = 64  # of a warpgroup
WARPGROUPS = 2  # that compute, of a block
CHOOSING = 32  # tokens of a tile that selects pages: bits of a word
RING_BYTES = 192 << 10  # of shared memory for pages, at most
MOST_STAGES = 4  # of the ring
WIDTHS = (64, 128)  # of a head
PAGES = (64, 128)  # tokens of a page

_NONE = -1e30  # maximum of a row that saw no key yet; finite, so never NaN


def attend(q_TNH, kv_MCKh, layout, selected_TKj, sink_N, form, numerics):
  """Returns the output [T, N, H] and the log-sum-exp of the scores [T, N].

  See `ops.paged_attention`.

  Raises:
    ValueError: on float32, sinks, a soft cap or a sink page, or on a head
      width, a page or a number of query heads that the kernel does not take.
  """
  del numerics
  _check_form(sink_N, form)
  tiles = Tiles.of(q_TNH, kv_MCKh, layout, selected_TKj, form)
  shape, count = tiles.shape, tiles.positions.shape[0]
  written = tiles.positions.max(-1) - tiles.current * shape.page + 1
  inputs = [tiles.count, tiles.pages, tiles.numbers, written, *tiles.choices]
  heads, rows = kv_MCKh.shape[2], shape.groups * ROWS
  out, lse = warpgroup.kernel(
      shape.kernel,
      name='paged_attention',
      grid=dict(heads=heads, tiles=count),
      out=[
          jax.ShapeDtypeStruct((heads, count, rows, shape.width), q_TNH.dtype),
          jax.ShapeDtypeStruct((heads, count, rows), nx.F32),
      ],
      scratch=shape.scratch(kv_MCKh.dtype),
      warpgroups=shape.groups + 1,
  )(*inputs, tiles.row_positions(), tiles.rows(q_TNH), kv_MCKh)
  return tiles.stream(out), tiles.stream(lse)


def _check_form(sink_N, form) -> None:
  """Raises ValueError on what only the other implementations know."""
  given = dict(
      sink_N=None if sink_N is None else sink_N.shape,
      soft_cap=form.soft_cap,
      sink_page=form.sink_page,
  )
  for name, value in given.items():
    if value:
      raise ValueError(
          f"{name}={value}: impl='pallas' on gpu does not know it, allowed are"
          " 'auto' and 'xla'"
      )


def _check(q, kv, groups: int) -> None:
  """Raises ValueError on what the kernel does not take."""
  if q.dtype != jnp.bfloat16 or kv.dtype != jnp.bfloat16:
    raise ValueError(
        f"q_TNH {q.dtype} and kv_MCKh {kv.dtype}: impl='pallas' on gpu needs"
        " bfloat16 (wgmma rounds float32 factors to TF32); float32 is for 'xla'"
    )
  if groups > WARPGROUPS:
    raise ValueError(
        f'{q.shape[1] // kv.shape[2]} query heads of a KV head: on gpu at most'
        f' {WARPGROUPS * ROWS // QUERY_TILE} are allowed'
    )
  if nx.interpret():
    return
  if q.shape[2] not in WIDTHS:
    raise ValueError(f'head width {q.shape[2]}: on gpu allowed are {WIDTHS}')
  if kv.shape[1] not in PAGES:
    raise ValueError(f'page size {kv.shape[1]}: on gpu allowed are {PAGES}')


def _row_tile(page: int, group: int, choosing: bool) -> int:
  """Tokens of a tile of packed rows: a divisor of the page."""
  tile = min(page, CHOOSING) if choosing else page
  while page % tile or tile > QUERY_TILE and tile * group > WARPGROUPS * ROWS:
    tile -= 1
  return tile


def _choices(selected_TKj, layout, numbers, tile):
  """Returns for each page of each list a word, a bit for each token.

  Args:
    selected_TKj: selected pages.
    layout: of the stream.
    numbers: int32 [tiles, K, capacity], the lists.
    tile: tokens of a tile.

  Returns:
    int32 [tiles, K, capacity].
  """
  chosen = to_tiles(selected_TKj, layout, fill=-1, tile=tile)
  chosen = chosen.transpose(0, 2, 1, 3)[..., None]  # [tiles, K, tile, j, 1]
  hit = (chosen == numbers[:, :, None, None]).any(3)
  bits = (1 << jnp.arange(tile, dtype=jnp.int32))[:, None]
  return jnp.where(hit, bits, 0).sum(2, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The tiles of a stream, and the pages that each visits.

  Attributes:
    shape: what the kernels are made for.
    layout: of the stream.
    tile: tokens of a tile.
    heads: K.
    group: G.
    positions: int32 [tiles, tile], -1 in empty lanes.
    current: int32 [tiles], the current page.
    count: int32 [tiles, K or 1], pages that a tile visits.
    numbers: int32 [tiles, K or 1, capacity], their numbers, ascending.
    pages: their places in the pool.
    choices: of each page of each list a word of choices, and of each row its
      token's bit in there; nothing where tokens select no pages.
  """

  shape: Shape
  layout: Any
  tile: int
  heads: int
  group: int
  positions: jax.Array
  current: jax.Array
  count: jax.Array
  numbers: jax.Array
  pages: jax.Array
  choices: tuple[jax.Array, ...]

  @classmethod
  def of(cls, q_TNH, kv_MCKh, layout, selected_TKj, form) -> Tiles:
    """Cuts a stream into tiles; see `ops.paged_attention`.

    Raises:
      ValueError: on what the kernels do not take.
    """
    page, heads, both = kv_MCKh.shape[1:]
    group = q_TNH.shape[1] // heads
    choosing = selected_TKj is not None
    tile = QUERY_TILE
    if layout.tiles is None:
      tile = _row_tile(page, group, choosing)
    groups = pl.cdiv(tile * group, ROWS)
    _check(q_TNH, kv_MCKh, groups)
    shape = Shape(page, both // 2, groups, form.window, choosing)
    positions, table, current = tile_facts(layout, page, tile)
    count, numbers = visits(
        selected_TKj, layout, positions, current, page, form
    )
    pages = jnp.take_along_axis(table[:, None], numbers, 2)
    choices: tuple[jax.Array, ...] = ()
    if choosing:
      words = _choices(selected_TKj, layout, numbers, tile)
      bits = jnp.repeat(1 << jnp.arange(tile, dtype=jnp.int32), group)
      choices = words, jnp.pad(bits, (0, groups * ROWS - tile * group))
    return cls(
        shape,
        layout,
        tile,
        heads,
        group,
        positions,
        current,
        count,
        numbers,
        pages,
        choices,
    )

  @property
  def padding(self) -> int:
    """Rows of a tile that no token owns."""
    return self.shape.groups * ROWS - self.tile * self.group

  def row_positions(self):
    """Returns int32 [tiles, R], -1 where no token is."""
    of_rows = jnp.repeat(self.positions, self.group, 1)
    return jnp.pad(of_rows, [(0, 0), (0, self.padding)], constant_values=-1)

  def rows(self, x_TN):
    """[T, N, ...] -> [K, tiles, R, ...]."""
    rest = x_TN.shape[2:]
    x = to_tiles(x_TN, self.layout, tile=self.tile)
    x = x.reshape(-1, self.tile, self.heads, self.group, *rest)
    x = jnp.moveaxis(x, 2, 0)
    x = x.reshape(self.heads, -1, self.tile * self.group, *rest)
    return jnp.pad(
        x, [(0, 0), (0, 0), (0, self.padding), *[(0, 0)] * len(rest)]
    )

  def stream(self, x):
    """[K, tiles, R, ...] -> [T, N, ...]."""
    rest = x.shape[3:]
    x = x[:, :, : self.tile * self.group]
    x = x.reshape(self.heads, -1, self.tile, self.group, *rest)
    x = jnp.moveaxis(x, 0, 2)
    x = x.reshape(-1, self.tile, self.heads * self.group, *rest)
    return from_tiles(x, self.layout)


@dataclasses.dataclass(frozen=True)
class Shape:
  """What the kernel is made for.

  Attributes:
    page: C.
    width: H.
    groups: warpgroups that compute.
    window: of a sliding window, or None.
    choosing: whether tokens select pages.
  """

  page: int
  width: int
  groups: int
  window: int | None
  choosing: bool

  @property
  def stages(self) -> int:
    """Pages of the ring."""
    return min(MOST_STAGES, RING_BYTES // (self.page * self.width * 4))

  @property
  def scale(self) -> float:
    """Factor of the scores, with that of exp2."""
    return self.width**-0.5 * math.log2(math.e)

  def scratch(self, dtype):
    """Shared memory: queries, pages, sums; barriers."""
    return [
        plgpu.SMEM((self.groups, ROWS, self.width), dtype),
        plgpu.SMEM((self.stages, self.page, 2 * self.width), dtype),
        plgpu.SMEM((self.groups, ROWS), nx.F32),
        plgpu.Barrier(num_barriers=self.groups),  # queries are there
        plgpu.Barrier(num_barriers=self.stages),  # a page is there
        plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.groups),
        plgpu.Barrier(),  # the last page is clean
    ]

  def kernel(self, count, pages, numbers, written, *refs):
    """Grid (K, tiles), groups + 1 warpgroups."""
    chosen, refs = (refs[:2], refs[2:]) if self.choosing else (None, refs)
    pos, q, kv, out, lse, *scratch = refs
    head, tile = lax.axis_index('heads'), lax.axis_index('tiles')
    mine = lax.axis_index('warpgroups')
    entry = (tile, head if pages.shape[1] > 1 else 0)
    visited = count[entry]
    pages_ref = scratch[1]
    ring = warpgroup.Ring(self.stages, scratch[4], scratch[5])

    @pl.when(mine == self.groups)
    def _():
      if self.groups > 1 and not nx.interpret():
        plgpu.set_max_registers(24, action='decrease')

      def copy(i, slot, there):
        source = kv.at[pages[*entry, i], :, head]
        plgpu.copy_gmem_to_smem(source, pages_ref.at[slot], there)

      ring.fill(visited, copy)

    @pl.when(mine < self.groups)
    def _():
      if self.groups > 1 and not nx.interpret():
        plgpu.set_max_registers(240, action='increase')
      rows = pl.ds(mine * ROWS, ROWS)
      queries, sums = scratch[0].at[mine], scratch[2].at[mine]

      @pl.when(visited > 0)  # nobody reads the results of an empty tile
      def _():
        plgpu.copy_gmem_to_smem(
            q.at[head, tile, rows], queries, scratch[3].at[mine]
        )
        plgpu.barrier_wait(scratch[3].at[mine])
        place = warpgroup.load(pos, tile, rows)
        bit = warpgroup.load(chosen[1], rows) if chosen else None

        def visit(i, state, last=False):
          def step(slot):
            number, word = numbers[*entry, i], None
            if last:
              self._clean(pages_ref.at[slot], written[tile], mine, scratch[6])
            elif chosen:
              word = chosen[0][*entry, i]
            seen = self.seen(number, word, place, bit, last)
            return self._step(state, queries, pages_ref.at[slot], seen)

          return ring.read(i, visited, step)

        zero = jnp.zeros(ROWS, nx.F32)
        state = zero + _NONE, zero, jnp.zeros((ROWS, self.width), nx.F32)
        state = lax.fori_loop(0, visited - 1, visit, state)
        m, l, acc = visit(visited - 1, state, last=True)
        l = jnp.maximum(l, 1e-30)
        queries[...] = (acc * warpgroup.wide(1 / l, self.width)).astype(q.dtype)
        sums[...] = warpgroup.keep(m * self.width**-0.5) + jnp.log(l)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, out.at[head, tile, rows])
        plgpu.copy_smem_to_gmem(sums, lse.at[head, tile, rows])
        plgpu.wait_smem_to_gmem(0)

  def _clean(self, page, written, mine, ready):
    """Zeros the values of slots that nobody wrote yet: 0 · NaN is NaN.

    Args:
      page: [C, 2H] in shared memory.
      written: how many slots a token of the tile may see.
      mine: this warpgroup.
      ready: barrier.
    """

    @pl.when(mine == 0)
    def _():
      values = page.at[:, pl.ds(self.width, self.width)]
      v = values[...]
      keys = lax.broadcasted_iota(jnp.int32, v.shape, 0)
      values[...] = jnp.where(keys < written, v, jnp.zeros_like(v))
      plgpu.commit_smem()
      plgpu.barrier_arrive(ready)

    plgpu.barrier_wait(ready)

  def seen(self, number, word, place, bit, last):
    """Returns what each row sees of a page: bool [R, C], or None for all.

    Args:
      number: of the page in its sequence.
      word: of choices, or None.
      place: int32 [R], positions.
      bit: int32 [R], of each row in the word.
      last: whether it is the current page.
    """
    if word is not None:
      return warpgroup.wide(bit & word, self.page) != 0
    if self.window is None and not last:
      return None
    keys = lax.broadcasted_iota(jnp.int32, (ROWS, self.page), 1)
    ahead = warpgroup.wide(place - number * self.page, self.page) - keys
    if self.window is None:
      return ahead >= 0
    # In one comparison: what is negative is large without a sign.
    return ahead.astype(jnp.uint32) < jnp.uint32(self.window)

  def _step(self, state, queries, page, seen):
    """One page of the online softmax.

    Args:
      state: (m [R], l [R], acc [R, H]).
      queries: [R, H] in shared memory.
      page: [C, 2H] in shared memory, finite where it is seen.
      seen: bool [R, C], or None for all.

    Returns:
      The new state.
    """
    m, l, acc = state
    k = page.at[:, pl.ds(0, self.width)]
    v = page.at[:, pl.ds(self.width, self.width)]
    s = warpgroup.times_transposed(queries, k)
    if seen is not None:
      s = jnp.where(seen, s, -jnp.inf)
    m_new = jnp.maximum(m, s.max(1))
    a = jnp.exp2((m - m_new) * self.scale)
    p = jnp.exp2((s - warpgroup.wide(m_new, self.page)) * self.scale)
    l = warpgroup.keep(l * a) + warpgroup.row_sums(p)
    return m_new, l, self._add_values(acc, a, p.astype(v.dtype), v)

  def _add_values(self, total, a, p, values):
    """Returns a · total + p v, float32 [R, H]."""
    if nx.interpret():  # which does not know factors in registers
      part = jnp.matmul(p, values[...], preferred_element_type=nx.F32)
      return warpgroup.keep(total * warpgroup.wide(a, self.width)) + part

    def run(acc):
      plgpu.wgmma(acc, p, values)
      # Meanwhile:
      scaled = warpgroup.keep(total * warpgroup.wide(a, self.width))
      return scaled + acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, self.width), nx.F32))
