"""Gradient of paged attention on packed rows, for Hopper GPUs.

Two kernels, without atomics: one walks the pages that a tile of queries visits
and finishes its dQ, the other walks the tiles that visit a page, ascending, and
finishes its dK and dV. The lists of the second are those of the first, sorted
by page. Both compute the scores again.

  P = exp(S - lse),  dV = Pᵀ dO,  dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O)),
  dQ = dS K / √H,  dK = dSᵀ Q / √H.   Source: arXiv:2205.14135 alg. 4.

P and dS are rounded to bfloat16 before they are multiplied, as on TPU.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import numerics as nx
from kernels_pallas import warpgroup
from kernels_pallas.paged_attention import pallas_gpu as forward

KEYS = 64  # of a page, that are multiplied at once
RING_BYTES = 128 << 10  # of shared memory, at most


def attend_rows_backward(
    q_TNH,
    kv_MCKh,
    layout,
    selected_TKj,
    out_TNH,
    lse_TN,
    g_TNH,
    form,
    numerics,
):
  """Returns dq [T, N, H] and dkv [M, C, K, 2H] of `ops.paged_attention`.

  Args:
    q_TNH: bfloat16 queries.
    kv_MCKh: bfloat16 keys and values; the pages are the rows.
    layout: of the rows.
    selected_TKj: selected pages, or None.
    out_TNH: the output.
    lse_TN: log-sum-exp of the scores.
    g_TNH: gradient of the output.
    form: window.
    numerics: unused, the precision is that of the tensor core.

  Raises:
    ValueError: as `pallas_gpu.attend`.
  """
  del numerics
  tiles = forward.Tiles.of(q_TNH, kv_MCKh, layout, selected_TKj, form)
  g = g_TNH.astype(q_TNH.dtype)
  delta = (g.astype(nx.F32) * out_TNH.astype(nx.F32)).sum(-1)
  shift = lse_TN * tiles.shape.width**0.5  # in units of q · k
  rows = [tiles.rows(x) for x in (q_TNH, g, shift, delta)]
  rows.append(tiles.row_positions())
  dq = _Queries(tiles).run(rows, kv_MCKh)
  dkv = _Keys(tiles).run(rows, kv_MCKh)
  return tiles.stream(dq), dkv


@dataclasses.dataclass(frozen=True)
class _Queries:
  """The kernel of dQ; see `pallas_gpu.attend` for how it walks.

  Attributes:
    tiles: of the rows.
  """

  tiles: forward.Tiles

  @property
  def stages(self) -> int:
    """Pages of the ring."""
    shape = self.tiles.shape
    return min(4, RING_BYTES // (shape.page * shape.width * 4))

  def run(self, rows, kv_MCKh):
    """Returns dq [K, tiles, R, H].

    Args:
      rows: queries, gradients, log-sum-exps, rowsum(dO ∘ O), positions.
      kv_MCKh: keys and values.
    """
    tiles, shape, dtype = self.tiles, self.tiles.shape, kv_MCKh.dtype
    inputs = [tiles.count, tiles.pages, tiles.numbers, *tiles.choices]
    both = plgpu.SMEM((2 * shape.groups, forward.ROWS, shape.width), dtype)
    stages = self.stages
    return warpgroup.kernel(
        self.kernel,
        name='paged_attention_queries',
        grid=dict(heads=tiles.heads, tiles=tiles.positions.shape[0]),
        out=jax.ShapeDtypeStruct(rows[0].shape, dtype),
        scratch=[
            both,
            plgpu.SMEM((stages, shape.page, 2 * shape.width), dtype),
            plgpu.Barrier(num_barriers=shape.groups, num_arrivals=2),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages, num_arrivals=shape.groups),
        ],
        warpgroups=shape.groups + 1,
    )(*inputs, *rows, kv_MCKh)

  def kernel(self, count, pages, numbers, *refs):
    """Grid (K, tiles), groups + 1 warpgroups."""
    shape = self.tiles.shape
    chosen, refs = (refs[:2], refs[2:]) if shape.choosing else (None, refs)
    q, g, shift, delta, pos, kv, dq, *scratch = refs
    both, pages_ref, ready, there, free = scratch
    head, tile = lax.axis_index('heads'), lax.axis_index('tiles')
    mine = lax.axis_index('warpgroups')
    entry = (tile, head if pages.shape[1] > 1 else 0)
    visited = count[entry]
    ring = warpgroup.Ring(self.stages, there, free)

    @pl.when(mine == shape.groups)
    def _():
      _registers(shape.groups, brings=True)

      def copy(i, slot, there):
        source = kv.at[pages[*entry, i], :, head]
        plgpu.copy_gmem_to_smem(source, pages_ref.at[slot], there)

      ring.fill(visited, copy)

    @pl.when(mine < shape.groups)
    def _():
      _registers(shape.groups, brings=False)
      rows = pl.ds(mine * forward.ROWS, forward.ROWS)
      place = head, tile, rows
      queries, grads = both.at[2 * mine], both.at[2 * mine + 1]
      plgpu.copy_gmem_to_smem(q.at[place], queries, ready.at[mine])
      plgpu.copy_gmem_to_smem(g.at[place], grads, ready.at[mine])
      plgpu.barrier_wait(ready.at[mine])
      facts = [warpgroup.load(x, *place) for x in (shift, delta)]
      where = warpgroup.load(pos, tile, rows)
      bit = warpgroup.load(chosen[1], rows) if chosen else None

      def visit(i, total, last=False):
        hit = None if last or not chosen else bit & chosen[0][*entry, i]
        # Positions, counted from the page's first key.
        ahead = where - numbers[*entry, i] * shape.page

        def step(slot):
          return self._step(
              total, queries, grads, pages_ref.at[slot], facts, ahead, hit, last
          )

        return ring.read(i, visited, step)

      total = jnp.zeros((forward.ROWS, shape.width), nx.F32)
      total = lax.fori_loop(0, visited - 1, visit, total)
      total = visit(visited - 1, total, last=True)
      queries[...] = total.astype(dq.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(queries, dq.at[place])
      plgpu.wait_smem_to_gmem(0)

  def _step(self, total, q, g, page, facts, ahead, hit, last):
    """Returns total + dS K of one page."""
    shape = self.tiles.shape
    size = min(shape.page, KEYS)
    for begin in range(0, shape.page, size):
      keys = pl.ds(begin, size)
      k = page.at[keys, pl.ds(0, shape.width)]
      v = page.at[keys, pl.ds(shape.width, shape.width)]
      s, dp = (warpgroup.times_transposed(*x) for x in ((q, k), (g, v)))
      seen = _seen(shape, ahead - begin, hit, last, size, 0)
      wide = lambda x, size=size: warpgroup.wide(x, size)
      _, ds = _softmax_backward(shape, s, dp, *map(wide, facts), seen)
      total = warpgroup.add_product(total, ds.astype(k.dtype), k)
    return total


@dataclasses.dataclass(frozen=True)
class _Keys:
  """The kernel of dK and dV.

  A warpgroup has some keys of a page; the tiles of queries that visit it come
  through a ring.

  Attributes:
    tiles: of the rows.
  """

  tiles: forward.Tiles

  @property
  def keys(self) -> int:
    """Keys of a warpgroup."""
    return min(self.tiles.shape.page, KEYS)

  @property
  def groups(self) -> int:
    """Warpgroups that compute."""
    return self.tiles.shape.page // self.keys

  @property
  def stages(self) -> int:
    """Tiles of the ring."""
    shape = self.tiles.shape
    rows = shape.groups * forward.ROWS
    return min(4, RING_BYTES // (rows * shape.width * 4))

  def visitors(self, num_pages: int):
    """Turns the lists of pages round.

    Returns:
      begin int32 [K or 1, M + 1], where the tiles of each page begin; tiles
      int32 [K or 1, n], ascending for each page; and their words of choices, or
      None.
    """
    tiles = self.tiles
    _, lists, capacity = tiles.numbers.shape
    used = jnp.arange(capacity) < tiles.count[..., None]
    flat = lambda x: x.swapaxes(0, 1).reshape(lists, -1)
    page = flat(jnp.where(used, tiles.pages, num_pages))
    order = jnp.argsort(page, axis=1, stable=True).astype(jnp.int32)
    begin = jax.vmap(lambda x: jnp.searchsorted(x, jnp.arange(num_pages + 1)))(
        jnp.take_along_axis(page, order, 1)
    )
    words = None
    if tiles.choices:
      words = jnp.take_along_axis(flat(tiles.choices[0]), order, 1)
    return begin.astype(jnp.int32), order // capacity, words

  def run(self, rows, kv_MCKh):
    """Returns dkv [M, C, K, 2H]; arguments as `_Queries.run`."""
    tiles, shape, dtype = self.tiles, self.tiles.shape, kv_MCKh.dtype
    begin, visitors, words = self.visitors(kv_MCKh.shape[0])
    # Sequences begin on page boundaries: so do the positions of a page.
    first = tiles.layout.positions_T[:: shape.page]
    inputs = [begin, visitors, first]
    if words is not None:
      inputs += [words, tiles.choices[1]]
    stages, high = self.stages, shape.groups * forward.ROWS
    return warpgroup.kernel(
        self.kernel,
        name='paged_attention_keys',
        grid=dict(heads=tiles.heads, pages=kv_MCKh.shape[0]),
        out=jax.ShapeDtypeStruct(kv_MCKh.shape, dtype),
        scratch=[
            plgpu.SMEM((self.groups, self.keys, 2 * shape.width), dtype),
            plgpu.SMEM((stages, high, shape.width), dtype),
            plgpu.SMEM((stages, high, shape.width), dtype),
            plgpu.SMEM((stages, high), nx.F32),
            plgpu.SMEM((stages, high), nx.F32),
            plgpu.SMEM((stages, high), jnp.int32),
            plgpu.Barrier(num_barriers=self.groups),
            plgpu.Barrier(num_barriers=stages, num_arrivals=5),
            plgpu.Barrier(num_barriers=stages, num_arrivals=self.groups),
        ],
        warpgroups=self.groups + 1,
    )(*inputs, *rows, kv_MCKh)

  def kernel(self, begin, visitors, first, *refs):
    """Grid (K, pages), groups + 1 warpgroups."""
    shape = self.tiles.shape
    chosen, refs = (refs[:2], refs[2:]) if shape.choosing else (None, refs)
    *rows, kv, dkv, keys, q, g, shift, delta, pos, ready, there, free = refs
    head, page = lax.axis_index('heads'), lax.axis_index('pages')
    mine = lax.axis_index('warpgroups')
    entry = head if begin.shape[0] > 1 else 0
    start = begin[entry, page]
    count = begin[entry, page + 1] - start
    ring = warpgroup.Ring(self.stages, there, free)

    @pl.when(mine == self.groups)
    def _():
      _registers(self.groups, brings=True)

      def copy(i, slot, there):
        tile = visitors[entry, start + i]
        for source, target in zip(rows, (q, g, shift, delta, pos)):
          at = (tile,) if target is pos else (head, tile)
          plgpu.copy_gmem_to_smem(source.at[at], target.at[slot], there)

      ring.fill(count, copy)

    @pl.when(mine < self.groups)
    def _():
      _registers(self.groups, brings=False)
      place = page, pl.ds(mine * self.keys, self.keys), head
      my_keys = keys.at[mine]
      plgpu.copy_gmem_to_smem(kv.at[place], my_keys, ready.at[mine])
      plgpu.barrier_wait(ready.at[mine])
      base = first[page] + mine * self.keys

      def visit(i, state, own=False):
        word = None
        if chosen and not own:
          word = chosen[0][entry, start + i]

        def step(slot):
          out = state
          for row in range(0, q.shape[1], forward.ROWS):
            at = slot, pl.ds(row, forward.ROWS)
            hit = None
            if word is not None:
              hit = warpgroup.load(chosen[1], at[1]) & word
            ahead = pos[at] - base
            out = self._step(
                out,
                my_keys,
                *(x.at[at] for x in (q, g, shift, delta)),
                _seen(shape, ahead, hit, own, self.keys, 1),
            )
          return out

        return ring.read(i, count, step)

      zero = jnp.zeros((self.keys, shape.width), nx.F32)
      # The tiles of the page itself come first.
      own = shape.page // self.tiles.tile
      state = lax.fori_loop(
          0, own, lambda i, s: visit(i, s, own=True), (zero, zero)
      )
      state = lax.fori_loop(own, count, visit, state)
      for i, total in enumerate(state):
        target = my_keys.at[:, pl.ds(i * shape.width, shape.width)]
        target[...] = total.astype(dkv.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(my_keys, dkv.at[place])
      plgpu.wait_smem_to_gmem(0)

  def _step(self, state, keys, q, g, shift, delta, seen):
    """Adds the parts of some rows to (dK, dV)."""
    shape = self.tiles.shape
    dk, dv = state
    k, v = (keys.at[:, pl.ds(i * shape.width, shape.width)] for i in range(2))
    s, dp = (warpgroup.times_transposed(*x) for x in ((k, q), (v, g)))
    tall = lambda x: lax.broadcast_in_dim(x[...], s.shape, (1,))
    p, ds = _softmax_backward(shape, s, dp, tall(shift), tall(delta), seen)
    dv = warpgroup.add_product(dv, p.astype(g.dtype), g)
    return warpgroup.add_product(dk, ds.astype(q.dtype), q), dv


def _registers(groups: int, brings: bool) -> None:
  """Shares registers out between who computes and who brings pages."""
  if groups > 1 and not nx.interpret():
    if brings:
      plgpu.set_max_registers(24, action='decrease')
    else:
      plgpu.set_max_registers(240, action='increase')


def _seen(shape, ahead, hit, own: bool, keys: int, axis: int):
  """Returns which keys each row sees, or None for all.

  Args:
    shape: what the kernel is made for.
    ahead: int32 [R], positions of the rows, less that of the first key.
    hit: int32 [R], nonzero in rows that selected the page, or None.
    own: whether it may be the rows' own page.
    keys: how many.
    axis: of the rows in the result.

  Returns:
    bool, [R, keys] or [keys, R].
  """
  size = ahead.shape[0]
  block = (size, keys) if axis == 0 else (keys, size)
  spread = lambda x: lax.broadcast_in_dim(x, block, (axis,))
  if hit is not None:
    return spread(hit) != 0
  if shape.window is None and not own:
    return None
  past = spread(ahead) - lax.broadcasted_iota(jnp.int32, block, 1 - axis)
  if shape.window is None:
    return past >= 0
  # In one comparison: what is negative is large without a sign.
  return past.astype(jnp.uint32) < jnp.uint32(shape.window)


def _softmax_backward(shape, s, dp, shift, delta, seen):
  """Returns P and dS / √H in float32, all of one shape."""
  p = jnp.exp2((s - shift) * shape.scale)
  if seen is not None:
    p = jnp.where(seen, p, 0.0)
  return p, p * (dp - delta) * shape.width**-0.5
