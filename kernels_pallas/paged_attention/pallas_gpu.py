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
REDUCED = 8  # columns that four threads hold together

_NONE = -1e30  # maximum of a row that saw no key yet; finite, so never NaN

_BY_WIDTH = (((1,), (1,)), ((), ()))  # rh, ch -> rc
_BY_KEY = (((1,), (0,)), ((), ()))  # rc, ch -> rh


def attend(q_TNH, kv_MCKh, layout, selected_TKj, sink_N, form, numerics):
  """Returns the output [T, N, H] and the log-sum-exp of the scores [T, N].

  See `ops.paged_attention`.

  Raises:
    ValueError: on float32, sinks, a soft cap or a sink page, or on a head
      width, a page or a number of query heads that the kernel does not take.
  """
  del numerics
  page, heads, both = kv_MCKh.shape[1:]
  group, width = q_TNH.shape[1] // heads, both // 2
  tile = QUERY_TILE
  if layout.tiles is None:
    tile = _row_tile(page, group, selected_TKj is not None)
  groups = pl.cdiv(tile * group, ROWS)
  _check_form(sink_N, form)
  _check(q_TNH, kv_MCKh, groups)
  shape = _Shape(page, width, groups, form.window, selected_TKj is not None)
  positions, table, current = tile_facts(layout, page, tile)
  count, numbers = visits(
      selected_TKj, layout, positions, current, page, form
  )
  inputs = [count, jnp.take_along_axis(table[:, None], numbers, 2), numbers]
  inputs.append(positions.max(-1) - current * page + 1)
  tiles, rows = positions.shape[0], groups * ROWS
  extra = rows - tile * group
  if shape.choosing:
    # Of each page a word of choices, of each row its token's bit in there.
    inputs.append(_choices(selected_TKj, layout, numbers, tile))
    bits = jnp.repeat(1 << jnp.arange(tile, dtype=jnp.int32), group)
    inputs.append(jnp.pad(bits, (0, extra)))
  of_rows = jnp.repeat(positions, group, 1)
  inputs.append(jnp.pad(of_rows, [(0, 0), (0, extra)], constant_values=-1))
  q = to_tiles(q_TNH, layout, tile=tile)
  q = q.reshape(tiles, tile, heads, group, width).transpose(2, 0, 1, 3, 4)
  q = q.reshape(heads, tiles, tile * group, width)
  inputs.append(jnp.pad(q, [(0, 0), (0, 0), (0, extra), (0, 0)]))
  out, lse = warpgroup.kernel(
      shape.kernel,
      name='paged_attention',
      grid=dict(heads=heads, tiles=tiles),
      out=[
          jax.ShapeDtypeStruct((heads, tiles, rows, width), q.dtype),
          jax.ShapeDtypeStruct((heads, tiles, rows), nx.F32),
      ],
      scratch=shape.scratch(kv_MCKh.dtype),
      warpgroups=groups + 1,
  )(*inputs, kv_MCKh)

  def stream(x):  # [K, tiles, R, ...] -> [T, N, ...]
    x = x[:, :, : tile * group].reshape(heads, tiles, tile, group, *x.shape[3:])
    x = jnp.moveaxis(x, 0, 2)
    return from_tiles(x.reshape(tiles, tile, -1, *x.shape[4:]), layout)

  return stream(out), stream(lse)


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
class _Shape:
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
    ring, there, free = scratch[1], scratch[4], scratch[5]

    @pl.when(mine == self.groups)
    def _():
      if self.groups > 1 and not nx.interpret():
        plgpu.set_max_registers(24, action='decrease')

      @pl.loop(0, visited)
      def _(i):
        slot = lax.rem(i, self.stages)

        @pl.when(i >= self.stages)
        def _():
          plgpu.barrier_wait(free.at[slot])

        plgpu.copy_gmem_to_smem(
            kv.at[pages[*entry, i], :, head], ring.at[slot], there.at[slot]
        )

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
          slot = lax.rem(i, self.stages)
          plgpu.barrier_wait(there.at[slot])
          number, word = numbers[*entry, i], None
          if last:
            self._clean(ring.at[slot], written[tile], mine, scratch[6])
          elif chosen:
            word = chosen[0][*entry, i]
          seen = self._seen(number, word, place, bit, last)
          state = self._step(state, queries, ring.at[slot], seen)

          # The copies of the last pages wait for nothing.
          @pl.when(i + self.stages < visited)
          def _():
            plgpu.barrier_arrive(free.at[slot])

          return state

        zero = jnp.zeros(ROWS, nx.F32)
        state = zero + _NONE, zero, jnp.zeros((ROWS, self.width), nx.F32)
        state = lax.fori_loop(0, visited - 1, visit, state)
        m, l, acc = visit(visited - 1, state, last=True)
        l = jnp.maximum(l, 1e-30)
        queries[...] = (acc * self._wide(1 / l, self.width)).astype(q.dtype)
        sums[...] = _keep(m * self.width**-0.5) + jnp.log(l)
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

  def _seen(self, number, word, place, bit, last):
    """Returns what each row sees of a page: bool [R, C], or None for all.

    Args:
      number: of the page in its sequence.
      word: of choices, or None.
      place: int32 [R], positions.
      bit: int32 [R], of each row in the word.
      last: whether it is the current page.
    """
    if word is not None:
      return self._wide(bit & word, self.page) != 0
    if self.window is None and not last:
      return None
    keys = lax.broadcasted_iota(jnp.int32, (ROWS, self.page), 1)
    ahead = self._wide(place - number * self.page, self.page) - keys
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
    s = self._scores(queries, k)
    if seen is not None:
      s = jnp.where(seen, s, -jnp.inf)
    m_new = jnp.maximum(m, s.max(1))
    a = jnp.exp2((m - m_new) * self.scale)
    p = jnp.exp2((s - self._wide(m_new, self.page)) * self.scale)
    l = _keep(l * a) + _row_sums(p)
    return m_new, l, self._add_values(acc, a, p.astype(v.dtype), v)

  def _scores(self, queries, keys):
    """Returns q kᵀ, float32 [R, C]."""
    if nx.interpret():  # which does not know transposed tiles
      return _dot(queries[...], keys[...], _BY_WIDTH)

    def run(acc):
      plgpu.wgmma(acc, queries, plgpu.transpose_ref(keys, (1, 0)))
      return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, self.page), nx.F32))

  def _add_values(self, total, a, p, values):
    """Returns a · total + p v, float32 [R, H]."""
    if nx.interpret():  # which does not know factors in registers
      part = _dot(p, values[...], _BY_KEY)
      return _keep(total * self._wide(a, self.width)) + part

    def run(acc):
      plgpu.wgmma(acc, p, values)
      scaled = _keep(total * self._wide(a, self.width))  # meanwhile
      return scaled + acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, self.width), nx.F32))

  def _wide(self, x, width):
    """Repeats a number of each row along it, [R] -> [R, width]."""
    return lax.broadcast_in_dim(x, (ROWS, width), (0,))


def _dot(x, y, dims):
  return lax.dot_general(x, y, dims, preferred_element_type=nx.F32)


def _keep(x):
  """`Numerics.keep`; both LLVM and ptxas contract, even across a barrier."""
  return jnp.maximum(x, -3e38)


def _row_sums(p):
  """Sums rows [R, C] by a halving tree -> [R].

  The last columns lie in the registers of four threads, which add them in an
  order of their own, the same for every row.
  """
  while p.shape[1] > REDUCED:
    half = p.shape[1] // 2
    p = p[:, :half] + p[:, half:]
  return nx.Numerics().tree_sum(p) if nx.interpret() else p.sum(1)
