"""Paged attention for TPU: two ways to walk the pages, one arithmetic.

A tile is a few tokens of one sequence; its rows, tokens x G query heads of one
KV head, lie on the lanes, keys on the sublanes, so that maxima and sums run
over sublanes and the row statistics are [1, R] vectors. Every page is one step
of the online softmax, in the order of position; a page that a row does not see
is an exact no-op for it, so both walks give the same bits:

  * `_walk`: the pages of a list, brought by DMA a few at a time while the last
    few are multiplied, and those of the next list while this one ends. Serves
    the engine (decode and prefill chunks, all layers) and the learner's full
    and block-sparse layers. Only the current page, always the last, needs a
    mask per element. A step works on several score blocks, of several pages,
    heads or rows: while one is in its softmax, the matrix units have another.
  * `_slide`: the learner's sliding windows. Pages lie at fixed distances in the
    stream, so all masks but one row vector are known when it compiles, and the
    pipeline of the grid brings the pages.

Source of the online softmax: arXiv:2205.14135.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention.layout import QUERY_TILE
from kernels_pallas.paged_attention.layout import from_tiles
from kernels_pallas.paged_attention.layout import tile_facts
from kernels_pallas.paged_attention.layout import to_tiles
from kernels_pallas.paged_attention.visits import visits

LANES = 128
ROWS = 256  # most rows of one score block
WORK = 8  # score blocks of one step of `_walk`, over all its pages
AHEAD = 8  # score blocks that are multiplied before their turn
SLIDE_TOKENS = 256  # tokens of one grid step of `_slide`
SLIDE_PAGES = 8  # most pages before the tile that `_slide` takes

_NONE = -1e30  # maximum of a row that saw no key yet; finite, so never NaN
_FAR = 1e30  # shift that makes every probability of a row zero

_BY_WIDTH = (((1,), (1,)), ((), ()))  # ch, rh -> cr
_BY_KEY = (((0,), (0,)), ((), ()))  # ch, cr -> hr


def attend(q_TNH, kv_MCKh, layout, selected_TKj, sink_N, form, numerics):
  """Returns the output [T, N, H] and the log-sum-exp of the scores [T, N].

  See `ops.paged_attention`.

  Raises:
    ValueError: on a head width or a page that the chip does not take.
  """
  page, heads, both = kv_MCKh.shape[1:]
  _check_chip(page, both // 2)
  group = q_TNH.shape[1] // heads
  shape = _Shape(page, heads, both // 2, group, numerics, form)
  kv = kv_MCKh.reshape(*kv_MCKh.shape[:2], heads * both)
  if _slides(layout, page, form):
    return _slide_rows(q_TNH, kv, layout, sink_N, shape)
  return _walk_tiles(q_TNH, kv, layout, selected_TKj, sink_N, shape)


def _check_chip(page: int, width: int) -> None:
  if nx.interpret():
    return
  if width % 64:
    raise ValueError(f'head width {width}: a multiple of 64 is allowed on TPU')
  if page % 16:
    raise ValueError(f'page size {page}: a multiple of 16 is allowed on TPU')


class _Shape:
  """Sizes that all kernels share.

  Attributes:
    page: C.
    heads: K.
    width: H.
    group: G.
    numerics: rounding rules.
    form: window, soft cap and sink page.
    packed: keys and values of a head share one row of lanes (H = 64): queries
      are padded with zeros, outputs lie in the last H rows.
    unit: logits in a score: 1/√H where it is a bare product, the cap where it
      is a tanh.
    scale: powers of two in a score.
  """

  def __init__(self, page, heads, width, group, numerics, form):
    self.page, self.heads, self.width, self.group = page, heads, width, group
    self.numerics, self.form = numerics, form
    self.packed = width % LANES != 0
    self.unit = form.soft_cap or width**-0.5
    self.scale = self.unit * math.log2(math.e)

  @property
  def depth(self) -> int:
    """Width of the query rows and height of the accumulator."""
    return 2 * self.width if self.packed else self.width

  def keep(self, x):
    """`Numerics.keep`; Mosaic compiles what is written."""
    return self.numerics.keep(x) if nx.interpret() else x

  def sinks(self, sink_N, together, tile):
    """Returns [K / together, 1, R], the score of each row's sink."""
    sink = jnp.maximum(sink_N.astype(nx.F32) * (1 / self.unit), _NONE)
    sink = sink.reshape(-1, together, 1, self.group)
    sink = jnp.broadcast_to(sink, (*sink.shape[:2], tile, self.group))
    return sink.reshape(sink.shape[0], 1, -1)

  def start(self, rows, sink=None):
    """Returns (m, l [1, R], acc [depth, R]) of rows that saw no key.

    Args:
      rows: R.
      sink: [1, R] from `sinks`, or None.
    """
    zero = jnp.zeros((1, rows), nx.F32)
    acc = jnp.zeros((self.depth, rows), nx.F32)
    return (zero + _NONE, zero, acc) if sink is None else (sink, zero + 1, acc)

  def bend(self, s):
    """Applies the soft cap to products of queries and keys."""
    if not self.form.soft_cap:
      return s
    s = self.keep(s * (self.width**-0.5 / self.form.soft_cap))
    return self.numerics.tanh(s) if nx.interpret() else jnp.tanh(s)

  def bound(self, position, number):
    """Returns what a key's position on a page must exceed to be seen."""
    bound = position - self.form.window
    if self.form.sink_page:
      bound -= jnp.where(number == 0, 1 << 30, 0)
    return bound

  def scores(self, query, pages, owners=None):
    """Returns the products of queries and the keys of a page, [C, R].

    Several KV heads may share the lanes: a row takes from the product with
    each head's keys what its own head gives.

    Args:
      query: [R, depth].
      pages: of each head, [C, 2H].
      owners: of each head, bool [1, R], its rows; None for one head.
    """
    dot = self.numerics.dot
    parts = [self.keep(dot(self._keys(kv), query, _BY_WIDTH)) for kv in pages]
    return self.bend(_own(parts, owners))

  def step(self, state, s, pages, seen=None, rows=None, owners=None):
    """One page of the online softmax.

    Args:
      state: (m, l, acc).
      s: [C, R] from `scores`.
      pages: as in `scores`, their values finite.
      seen: bool [C, R], or None for all.
      rows: bool [1, R], which rows see the page, or None for all.
      owners: as in `scores`.

    Returns:
      The new state.
    """
    m, l, acc = state
    keep, dot = self.keep, self.numerics.dot
    if seen is not None:
      s = jnp.where(seen, s, -jnp.inf)
    best = s.max(0, keepdims=True)
    if rows is not None:
      best = jnp.where(rows, best, -jnp.inf)
    m_new = jnp.maximum(m, best)
    shift = m_new if rows is None else jnp.where(rows, m_new, _FAR)
    a = keep(jnp.exp2(keep((m - m_new) * self.scale)))
    p = keep(jnp.exp2(keep((s - shift) * self.scale)))
    l = keep(l * a) + _tree_sum_keys(p)
    p = self.numerics.cast(p).astype(pages[0].dtype)
    parts = [keep(dot(self._values(kv), p, _BY_KEY)) for kv in pages]
    pv = _own(parts, owners)
    return m_new, l, keep(acc * a) + pv

  def _keys(self, kv):
    return kv if self.packed else kv[:, : self.width]

  def _values(self, kv):
    return kv if self.packed else kv[:, self.width :]

  def finish(self, state):
    """Returns the output [R, depth] and the log-sum-exp [1, R]."""
    m, l, acc = state
    l = jnp.maximum(l, 1e-30)
    out = self.numerics.cast(self.keep(acc * (1 / l)))
    lse = self.keep(m * self.unit) + self.keep(jnp.log(l))
    return out.T, lse

  def pad(self, q):
    """Widens query rows [..., H] to [..., depth]."""
    if not self.packed:
      return q
    return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, self.width)])

  def cut(self, out):
    """Returns the [..., H] of [..., depth] that hold the output."""
    return out[..., self.depth - self.width :]


def _own(parts, owners):
  """Takes each row (a lane) from the part of its own head."""
  out = parts[0]
  for part, mine in zip(parts[1:], (owners or [None])[1:]):
    out = jnp.where(mine, part, out)
  return out


def _tree_sum_keys(p):
  """`Numerics.tree_sum` over the first axis, [C, R] -> [1, R]."""
  size = 1 << (p.shape[0] - 1).bit_length()
  if size != p.shape[0]:
    p = jnp.pad(p, [(0, size - p.shape[0]), (0, 0)])
  while size > 1:
    size //= 2
    p = p[:size] + p[size:]
  return p


def _scored(score, work):
  """Yields each item of work with its scores, made `AHEAD` items before.

  The matrix units take products in the order they are written in. Written one
  item after the other, they would wait for each softmax.

  Args:
    score: makes the scores of an item.
    work: the items.
  """
  ready = [score(item) for item in work[:AHEAD]]
  for n, item in enumerate(work):
    ready += [score(later) for later in work[n + AHEAD : n + AHEAD + 1]]
    yield item, ready.pop(0)


def _iota(shape, axis):
  return lax.broadcasted_iota(jnp.int32, shape, axis)


# ------------------------------------------------------------- lists of pages


def _walk_tiles(q_TNH, kv, layout, selected_TKj, sink_N, shape):
  """Attention of tiles that lie within a page, over lists of pages."""
  page, heads, group = shape.page, shape.heads, shape.group
  picks = selected_TKj is not None
  tile, together, blocks, at_once = walk_plan(
      page, heads, group, layout.tiles is None, picks
  )
  positions, table, current = tile_facts(layout, page, tile)
  count, numbers = visits(
      selected_TKj, layout, positions, current, page, shape.form
  )
  tiles, rows = positions.shape[0], together * tile * group
  listed = table[:, None]
  if picks or shape.form.window is not None:  # else every page, in order
    listed = jnp.take_along_axis(listed, numbers, 2)
  # The kernel does not check them; a check costs as much as a copy.
  listed = jnp.clip(listed, 0, kv.shape[0] - 1)
  newest = jnp.broadcast_to((positions.max(1) % page)[:, None], count.shape)
  # Less to compile where the compiler is not the chip's.
  work = 2 if nx.interpret() else WORK
  at_once = min(at_once, work)
  lead = work // at_once
  walk = [count[..., None], newest[..., None], listed, numbers]
  walk.append(_following(count, listed, lead * at_once))
  walk = jnp.concatenate(walk, -1)[:, :, None]
  q = to_tiles(q_TNH, layout, tile=tile)
  q = q.reshape(tiles, tile, heads // together, together, group, -1)
  q = q.transpose(2, 0, 3, 1, 4, 5).reshape(heads // together, tiles, rows, -1)
  q = shape.pad(q)
  of_rows = jnp.tile(jnp.repeat(positions, group, 1), (1, together))
  inputs = [walk, of_rows[:, None], q, kv]
  own = walk.shape[1] > 1
  specs = [
      pl.BlockSpec(
          (1, 1, 1, walk.shape[3]),
          lambda k, t: (t, k if own else 0, 0, 0),
          memory_space=pltpu.SMEM,
      ),
      pl.BlockSpec((1, 1, rows), lambda k, t: (t, 0, 0)),
      pl.BlockSpec((1, 1, rows, shape.depth), lambda k, t: (k, t, 0, 0)),
      pl.BlockSpec(memory_space=pl.ANY),
  ]
  if picks:
    chosen = _chosen_rows(selected_TKj, layout, tile, group)
    inputs.append(chosen)
    specs.append(
        pl.BlockSpec((1, 1, chosen.shape[2], rows), lambda k, t: (t, k, 0, 0))
    )
  if sink_N is not None:
    inputs.append(shape.sinks(sink_N, together, tile))
    specs.append(pl.BlockSpec((1, 1, rows), lambda k, t: (k, 0, 0)))
  ring = ((lead + 1) * at_once, page, together * 2 * shape.width)
  out, lse = pl.pallas_call(
      functools.partial(
          _walk,
          shape=shape,
          picks=picks,
          sinks=sink_N is not None,
          capacity=numbers.shape[2],
          together=together,
          blocks=blocks,
          at_once=at_once,
          lead=lead,
      ),
      grid=(heads // together, tiles),
      in_specs=specs,
      out_specs=[
          pl.BlockSpec((1, 1, rows, shape.depth), lambda k, t: (k, t, 0, 0)),
          pl.BlockSpec((1, 1, 1, rows), lambda k, t: (k, t, 0, 0)),
      ],
      out_shape=[
          jax.ShapeDtypeStruct(q.shape, q.dtype),
          jax.ShapeDtypeStruct((heads // together, tiles, 1, rows), nx.F32),
      ],
      scratch_shapes=[
          pltpu.VMEM(ring, kv.dtype),
          pltpu.SemaphoreType.DMA(ring[:1]),
          pltpu.VMEM((2, rows), nx.F32),
          pltpu.VMEM((shape.depth, rows), nx.F32),
          pltpu.SMEM((1,), jnp.int32),
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('arbitrary', 'arbitrary'),
          vmem_limit_bytes=math.prod(ring) * kv.dtype.itemsize + (16 << 20),
          disable_bounds_checks=True,
      ),
      interpret=nx.interpret(),
      name='paged_attention_walk',
  )(*inputs)
  return _to_stream(out, lse, layout, tile, shape, together)


def walk_plan(page: int, heads: int, group: int, rows: bool, picks: bool):
  """Returns what a grid step of `_walk` does.

  Args:
    page: C.
    heads: K.
    group: G.
    rows: packed rows of the learner, not the engine's stream.
    picks: whether each KV head has pages of its own.

  Returns:
    Tokens of a tile, KV heads of a grid step, their score blocks, and the
    pages that are multiplied at once.
  """
  tile, together = QUERY_TILE, 1
  if rows:
    tile = _row_tile(page, group, ROWS if picks else WORK * ROWS)
  if not picks:  # all heads visit the same pages: read them once
    together = _together(heads, tile * group)
  blocks = _blocks(tile * group, together)
  return tile, together, blocks, _pages_at_once(len(blocks))


def _blocks(rows: int, together: int):
  """Returns the score blocks of a grid step: first row, rows, whose they are.

  A block is some rows of one head, or the rows of several heads that fill the
  lanes. Where none of it fits, all heads are one block.

  Args:
    rows: of one KV head.
    together: KV heads of the step.
  """
  fills = lambda n: together % n == 0 and n * rows % LANES == 0
  share = next(filter(fills, range(1, together)), together)
  if share > 1:
    return [
        (h * rows, share * rows, range(h, h + share))
        for h in range(0, together, share)
    ]
  return [
      (h * rows + r, min(ROWS, rows - r), range(h, h + 1))
      for h in range(together)
      for r in range(0, rows, ROWS)
  ]


def _together(heads: int, rows: int) -> int:
  """Returns the KV heads of a grid step, as many as fit: a divisor."""

  def fits(n):
    sizes = [size for _, size, _ in _blocks(rows, n)]
    return len(sizes) <= WORK and max(sizes) <= max(ROWS, rows)

  divisors = (n for n in range(1, heads + 1) if heads % n == 0)
  return max(filter(fits, divisors), default=1)


def _pages_at_once(blocks: int) -> int:
  """Pages of one step of `_walk`; any number gives the same bits."""
  at_once = 1
  while 2 * at_once * blocks <= WORK:
    at_once *= 2
  return at_once


def _chosen_rows(selected_TKj, layout, tile, group):
  """Selected pages of each row, [tiles, K, j to a multiple of 8, R]."""
  chosen = to_tiles(selected_TKj, layout, fill=-1, tile=tile)
  chosen = chosen.transpose(0, 2, 3, 1)
  extra = -chosen.shape[2] % 8
  chosen = jnp.pad(
      chosen, [(0, 0), (0, 0), (0, extra), (0, 0)], constant_values=-1
  )
  return jnp.repeat(chosen, group, 3)


def _row_tile(page: int, group: int, most: int = ROWS) -> int:
  """Tokens of a tile of at most so many rows: a divisor of the page."""
  tile = page
  while tile * group > most and tile % 2 == 0 and tile > QUERY_TILE:
    tile //= 2
  return tile


def _to_stream(out, lse, layout, tile, shape, together=1):
  """[K, tiles, R, depth] and [K, tiles, 1, R] -> [T, N, H] and [T, N]."""
  tiles = out.shape[1]

  def order(x):  # [K / together, tiles, together · tile · G, h]
    x = x.reshape(-1, tiles, together, tile, shape.group, x.shape[-1])
    x = x.transpose(1, 3, 0, 2, 4, 5)
    return x.reshape(tiles, tile, -1, x.shape[-1])

  out = order(shape.cut(out))
  lse = order(lse.swapaxes(2, 3))[..., 0]
  return from_tiles(out, layout), from_tiles(lse, layout)


def pages_read(layout, page, form, selected_TKj=None):
  """Returns int32 [tiles, K or 1], pages that the engine's tiles read.

  It is the length of the lists that `attend` walks, for each KV head, or one
  for all.

  Args:
    layout: of the engine.
    page: C.
    form: window and sink page.
    selected_TKj: as `attend` gets it.
  """
  positions, _, current = tile_facts(layout, page)
  return visits(selected_TKj, layout, positions, current, page, form)[0]


def _following(count, listed, n):
  """Of each list, how long the next one in the grid is, and its first pages.

  Args:
    count: int32 [tiles, K or 1].
    listed: int32 [tiles, K or 1, capacity].
    n: how many pages; zeros where the capacity is less.

  Returns:
    int32 [tiles, K or 1, 1 + n]; after the last list comes the first.
  """
  short = max(0, n - listed.shape[-1])
  near = jnp.pad(listed[..., :n], [(0, 0), (0, 0), (0, short)])
  x = jnp.concatenate([count[..., None], near], -1).swapaxes(0, 1)
  x = jnp.roll(x.reshape(-1, x.shape[-1]), -1, 0).reshape(x.shape)
  return x.swapaxes(0, 1)


def _walk(
    walk,
    pos,
    q,
    kv,
    *rest,
    shape,
    picks,
    sinks,
    capacity,
    together,
    blocks,
    at_once,
    lead,
):
  """Grid (K / together, tiles): one tile of some KV heads.

  A list is walked in steps: full ones, of `at_once` past pages, in a loop; then
  what is left of the past, with the current page. While a step is computed, the
  one `lead` steps later is on its way; steps after the tile's last are those of
  the next tile, which finds them in the ring.
  """
  *more, out, lse, pages, sems, stats, accs, turn = rest
  chosen = more[0] if picks else None
  sink = more[-1] if sinks else None
  windowed = shape.form.window is not None
  head, tile = pl.program_id(0), pl.program_id(1)
  wrap = tile + 1 == pl.num_programs(1)
  begin = (head == 0) & (tile == 0)
  end = wrap & (head + 1 == pl.num_programs(0))
  count, newest = walk[0, 0, 0, 0], walk[0, 0, 0, 1]
  follows = 2 + 2 * capacity
  count_next = jnp.where(end, 0, walk[0, 0, 0, follows])
  number_of = lambda place: walk[0, 0, 0, 2 + capacity + place]
  both = 2 * shape.width
  full = lax.div(jnp.maximum(count - 1, 0), at_once)
  left = count - 1 - full * at_once
  steps = full + 1  # of an empty tile one, without pages
  offsets = _iota((shape.page, 1), 0)
  owners = [_owners(*block) for block in blocks]
  queries = [q[0, 0, first : first + rows] for first, rows, _ in blocks]

  @pl.when(begin)
  def _():
    turn[0] = 0

  base = turn[0]  # place of the tile's first step in the ring

  def slot_of(step, u):
    return lax.rem(base + step, lead + 1) * at_once + u

  def copy(step, u, page=0, start=0):
    slot = slot_of(step, u)
    source = kv.at[page, :, pl.ds(start, together * both)]
    return pltpu.make_async_copy(source, pages.at[slot], sems.at[slot])

  def fetch(step):
    """Starts a step's copies: past pages in order, the last page in the end."""
    mine = step < steps
    first = jnp.where(mine, step, step - steps) * at_once
    more = jnp.where(mine, count, count_next) - 1 - first
    listed = jnp.where(mine, 2, follows + 1) + first
    start = jnp.where(mine | ~wrap, head, head + 1) * together * both
    if not nx.interpret():
      start = pl.multiple_of(start, LANES)
    for u in range(at_once - 1):
      c = copy(step, u, walk[0, 0, 0, listed + u], start)
      pl.when(u < more)(c.start)
    last = jnp.clip(more, 0, at_once - 1)
    c = copy(step, at_once - 1, walk[0, 0, 0, listed + last], start)
    pl.when(more >= 0)(c.start)

  def kv_of(step, u, i):
    slot = slot_of(step, u)
    return [pages[slot, :, h * both : (h + 1) * both] for h in blocks[i][2]]

  def rows_of(i):
    return pl.ds(blocks[i][0], blocks[i][1])

  def load(i):
    return stats[:1, rows_of(i)], stats[1:, rows_of(i)], accs[:, rows_of(i)]

  def save(i, state):
    stats[:1, rows_of(i)], stats[1:, rows_of(i)], accs[:, rows_of(i)] = state

  def in_window(number, i):
    bound = shape.bound(pos[0, :, rows_of(i)], number)
    return number * shape.page + offsets > bound

  def walk_past(step, u, i, state, s, here):
    """One past page of a block; `here` as `rows` of `_Shape.step`."""
    number = number_of(jnp.minimum(step * at_once + u, capacity - 1))
    if chosen is not None:
      hit = jnp.where(chosen[0, 0, :, rows_of(i)] == number, 1.0, 0.0)
      hit = hit.max(0, keepdims=True) > 0
      here = hit if here is None else here & hit
    seen = in_window(number, i) if windowed else None
    return shape.step(state, s, kv_of(step, u, i), seen, here, owners[i])

  def walk_current(step, u, i, state, s):
    # A slot that nobody wrote may hold anything, and 0 · NaN is NaN.
    page = [
        jnp.where(offsets <= newest, x, jnp.zeros_like(x))
        for x in kv_of(step, u, i)
    ]
    number = number_of(count - 1)
    seen = offsets <= pos[0, :, rows_of(i)] - number * shape.page
    if windowed:
      seen &= in_window(number, i)
    return shape.step(state, s, page, seen, None, owners[i])

  def scored(step):
    """Yields ((place, block), scores) of a step."""
    work = [(u, i) for u in range(at_once) for i in range(len(blocks))]
    score = lambda item: shape.scores(
        queries[item[1]], kv_of(step, *item), owners[item[1]]
    )
    return _scored(score, work)

  def visit(step, _):
    fetch(step + lead)
    for u in range(at_once):
      copy(step, u).wait()
    states: dict[int, Any] = {}
    for (u, i), s in scored(step):
      state = states[i] if u else load(i)
      states[i] = walk_past(step, u, i, state, s, None)
    for i, state in states.items():
      save(i, state)
    return 0

  def wait(u, _):
    copy(full, u).wait()
    return 0

  def clear(u, _):
    pages[slot_of(full, u)] = jnp.zeros(pages.shape[1:], pages.dtype)
    return 0

  def finish():
    wait(at_once - 1, 0)
    if at_once > 1:
      lax.fori_loop(0, left, wait, 0)
      lax.fori_loop(left, at_once - 1, clear, 0)
    states = {i: load(i) for i in range(len(blocks))}
    for (u, i), s in scored(full):
      if u < at_once - 1:
        here = jnp.full((1, s.shape[1]), u, jnp.int32) < left
        states[i] = walk_past(full, u, i, states[i], s, here)
      else:
        state = walk_current(full, u, i, states[i], s)
        out[0, 0, rows_of(i)], lse[0, 0, :, rows_of(i)] = shape.finish(state)

  for step in range(lead):
    # All but the first tile find their own steps in the ring.
    missing = begin | (step >= steps) if step else begin
    pl.when(missing)(functools.partial(fetch, step))
  for i, (_, rows, _) in enumerate(blocks):
    save(i, shape.start(rows, None if sink is None else sink[0, :, rows_of(i)]))
  lax.fori_loop(0, full, visit, 0)
  fetch(full + lead)
  turn[0] = lax.rem(base + steps, lead + 1)
  pl.when(count > 0)(finish)

  @pl.when(count == 0)
  def _():
    out[0, 0] = jnp.zeros(out.shape[2:], out.dtype)
    lse[0, 0] = jnp.zeros(lse.shape[2:], nx.F32)


def _owners(_, rows, heads):
  """Of each head that shares a block, bool [1, R], its rows; or None."""
  if len(heads) == 1:
    return None
  of_row = lax.div(_iota((1, rows), 1), rows // len(heads))
  return [of_row == i for i in range(len(heads))]


# ------------------------------------------------------------ sliding windows


def _slides(layout, page, form) -> bool:
  """Whether `_slide` serves: rows, and a window of few pages and no other."""
  if layout.row_length is None or form.window is None or form.sink_page:
    return False
  return _back(page, form.window) <= SLIDE_PAGES


def _back(page: int, window: int) -> int:
  """Pages before a token's own that its window touches."""
  return -(-(window - 1) // page)


def _own_pages(pages: int, page: int, tokens: int = SLIDE_TOKENS) -> int:
  """Pages of queries of a grid step: a divisor of the row's pages."""
  own = max(1, tokens // page)
  while pages % own:
    own -= 1
  return own


def _slide_plan(shape, own, back):
  """What each block of rows of a tile of `_slide` visits.

  Yields:
    The first row, the number of rows, and for each visited page (its number
    from the first page of the window; whether some of its keys are in the
    future of some row, are out of the window of some row, may be of another
    sequence).
  """
  page, group, window = shape.page, shape.group, shape.form.window
  tokens = max(1, min(page, ROWS // group))
  while page % tokens:
    tokens -= 1
  for t0 in range(0, own * page, tokens):
    t1 = t0 + tokens - 1
    plan = []
    for j in range(back + own):
      off = (j - back) * page
      if off <= t1 and t0 - (off + page - 1) < window:
        plan.append((
            j, off + page - 1 > t0, t1 - off >= window, off < t0 // page * page
        ))  # fmt: skip
    yield t0 * group, tokens * group, plan


def _ahead(shape, r, rows):
  """int32 [C, rows], query's place in the tile - key's place in its page."""
  query = r // shape.group + lax.div(_iota((shape.page, rows), 1), shape.group)
  return query - _iota((shape.page, rows), 0)


def _slide_rows(q_TNH, kv, layout, sink_N, shape):
  """Sliding windows over packed rows, whose pages are the stream itself."""
  page, heads, group = shape.page, shape.heads, shape.group
  total = q_TNH.shape[0] // page
  own = _own_pages(layout.row_length // page, page)
  back, tile = _back(page, shape.form.window), own * page
  tiles, rows = total // own, tile * group
  stream = jnp.arange(q_TNH.shape[0], dtype=jnp.int32)
  first = (stream - layout.positions_T) // page  # of the token's sequence
  first = jnp.repeat(first.reshape(tiles, tile), group, 1)[:, None]
  q = q_TNH.reshape(tiles, tile, heads, group, -1).transpose(2, 0, 1, 3, 4)
  q = shape.pad(q.reshape(heads, tiles, rows, -1))
  both = 2 * shape.width

  def past(j):
    return pl.BlockSpec(
        (1, page, both),
        lambda k, t: (jnp.maximum(t * own - back + j, 0), 0, k),
    )

  sinks, sink_specs = [], []
  if sink_N is not None:
    sinks = [shape.sinks(sink_N, 1, tile)]
    sink_specs = [pl.BlockSpec((1, 1, rows), lambda k, t: (k, 0, 0))]
  out, lse = pl.pallas_call(
      functools.partial(_slide, shape=shape, own=own, back=back),
      grid=(heads, tiles),
      in_specs=[
          pl.BlockSpec((1, 1, rows), lambda k, t: (t, 0, 0)),
          pl.BlockSpec((1, 1, rows, shape.depth), lambda k, t: (k, t, 0, 0)),
          *(past(j) for j in range(back)),
          pl.BlockSpec((own, page, both), lambda k, t: (t, 0, k)),
          *sink_specs,
      ],
      out_specs=[
          pl.BlockSpec((1, 1, rows, shape.depth), lambda k, t: (k, t, 0, 0)),
          pl.BlockSpec((1, 1, 1, rows), lambda k, t: (k, t, 0, 0)),
      ],
      out_shape=[
          jax.ShapeDtypeStruct(q.shape, q.dtype),
          jax.ShapeDtypeStruct((heads, tiles, 1, rows), nx.F32),
      ],
      scratch_shapes=[pltpu.VMEM((back + own, page, both), kv.dtype)],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('arbitrary', 'arbitrary')
      ),
      interpret=nx.interpret(),
      name='paged_attention_slide',
  )(first, q, *([kv] * (back + 1)), *sinks)
  return _to_stream(out, lse, layout, tile, shape)


def _slide(first, q, *rest, shape, own, back):
  """Grid (K, tiles): `own` pages of queries of one KV head."""
  *inputs, out, lse, pages = rest
  past, current, sink = inputs[:back], inputs[back], inputs[back + 1 :]
  page, window = shape.page, shape.form.window
  start = pl.program_id(1) * own  # stream page of the tile's first token
  for j in range(back + own):
    kv = past[j][0] if j < back else current[j - back]
    # What no row of the tile sees may hold anything, and 0 · NaN is NaN.
    pages[j] = jnp.where(jnp.abs(kv) < 3e38, kv, jnp.zeros_like(kv))
  for r, rows, plan in _slide_plan(shape, own, back):
    part = pl.ds(r, rows)
    query, begin = q[0, 0, part], first[0, :, part]
    ahead = _ahead(shape, r, rows)
    state = shape.start(rows, sink[0][0, :, part] if sink else None)
    score = lambda item, query=query: shape.scores(query, [pages[item[0]]])
    for (j, diagonal, edge, other), s in _scored(score, plan):
      off = (j - back) * page
      seen = None
      if diagonal:
        seen = ahead >= off
      if edge:
        near = ahead < window + off
        seen = near if seen is None else seen & near
      mine = begin <= start + j - back if other else None
      state = shape.step(state, s, [pages[j]], seen, mine)
    o, e = shape.finish(state)
    out[0, 0, part] = o
    lse[0, 0, :, part] = e
