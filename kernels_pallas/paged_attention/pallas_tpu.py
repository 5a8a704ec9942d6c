"""Paged attention for TPU: two ways to walk the pages, one arithmetic.

A tile is a few tokens of one sequence; its rows, tokens x G query heads of one
KV head, lie on the lanes, keys on the sublanes, so that maxima and sums run
over sublanes and the row statistics are [1, R] vectors. Every page is one step
of the online softmax, in the order of position; a page that a row does not see
is an exact no-op for it, so both walks give the same bits:

  * `_walk`: the pages of a list, brought by DMA a few at a time while the last
    few are multiplied. Serves the engine (decode and prefill chunks, all
    layers) and the learner's full and block-sparse layers. Only the current
    page, always the last, needs a mask per element.
  * `_slide`: the learner's sliding windows. Pages lie at fixed distances in the
    stream, so all masks but one row vector are known when it compiles, and the
    pipeline of the grid brings the pages.

Source of the online softmax: arXiv:2205.14135.
"""

from __future__ import annotations

import functools
import math

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
ROWS = 256  # rows of one score block
DENSE_ROWS = 512  # rows of a tile where every past page is visited
WALK_PAGES = 8  # pages of one step of `_walk`, any number gives the same bits
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

  def step(self, state, queries, pages, seen=None, rows=None, lanes=None):
    """One page of the online softmax.

    Several KV heads may share the lanes: each head's queries are then zero in
    the rows of the others, and adding their products changes nothing.

    Args:
      state: (m, l, acc).
      queries: of each head, [R, depth].
      pages: of each head, [C, 2H], finite.
      seen: bool [C, R], or None for all.
      rows: bool [1, R], which rows see the page, or None for all.
      lanes: of each head, bool [1, R], its rows; None for one head.

    Returns:
      The new state.
    """
    m, l, acc = state
    keep, dot = self.keep, self.numerics.dot
    s = _total(
        keep(dot(self._keys(kv), q, _BY_WIDTH)) for kv, q in zip(pages, queries)
    )
    s = self.bend(s)
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
    parts = [p]
    if lanes is not None:
      parts = [jnp.where(own, p, jnp.zeros_like(p)) for own in lanes]
    pv = _total(
        keep(dot(self._values(kv), p, _BY_KEY)) for kv, p in zip(pages, parts)
    )
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


def _total(parts):
  """Adds the parts from the first to the last."""
  return functools.reduce(lambda a, b: a + b, parts)


def _tree_sum_keys(p):
  """`Numerics.tree_sum` over the first axis, [C, R] -> [1, R]."""
  size = 1 << (p.shape[0] - 1).bit_length()
  if size != p.shape[0]:
    p = jnp.pad(p, [(0, size - p.shape[0]), (0, 0)])
  while size > 1:
    size //= 2
    p = p[:size] + p[size:]
  return p


def _iota(shape, axis):
  return lax.broadcasted_iota(jnp.int32, shape, axis)


# ------------------------------------------------------------- lists of pages


def _walk_tiles(q_TNH, kv, layout, selected_TKj, sink_N, shape):
  """Attention of tiles that lie within a page, over lists of pages."""
  page, heads, group = shape.page, shape.heads, shape.group
  tile, together = QUERY_TILE, 1
  if layout.tiles is None:
    tile = _row_tile(page, group, DENSE_ROWS if selected_TKj is None else ROWS)
  elif selected_TKj is None:  # all heads visit the same pages: read them once
    together = _together(heads, tile * group)
  positions, table, current = tile_facts(layout, page, tile)
  count, numbers = visits(
      selected_TKj, layout, positions, current, page, shape.form
  )
  tiles, rows = positions.shape[0], together * tile * group
  listed = jnp.take_along_axis(table[:, None], numbers, 2)
  walk = jnp.concatenate([count[..., None], listed, numbers], -1)[:, :, None]
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
  if selected_TKj is not None:
    chosen = _chosen_rows(selected_TKj, layout, tile, group)
    inputs.append(chosen)
    specs.append(
        pl.BlockSpec((1, 1, chosen.shape[2], rows), lambda k, t: (t, k, 0, 0))
    )
  if sink_N is not None:
    inputs.append(shape.sinks(sink_N, together, tile))
    specs.append(pl.BlockSpec((1, 1, rows), lambda k, t: (k, 0, 0)))
  slots = 2 * _walk_pages() + 1
  out, lse = pl.pallas_call(
      functools.partial(
          _walk,
          shape=shape,
          picks=selected_TKj is not None,
          sinks=sink_N is not None,
          capacity=numbers.shape[2],
          together=together,
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
          pltpu.VMEM((slots, page, together * 2 * shape.width), kv.dtype),
          pltpu.SemaphoreType.DMA((slots,)),
      ],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('arbitrary', 'arbitrary')
      ),
      interpret=nx.interpret(),
      name='paged_attention_walk',
  )(*inputs)
  return _to_stream(out, lse, layout, tile, shape, together)


def _walk_pages() -> int:
  # Less to compile where the compiler is not the chip's.
  return 2 if nx.interpret() else WALK_PAGES


def _together(heads: int, rows: int) -> int:
  """KV heads of one grid step: a divisor, at most ROWS rows."""
  return max(
      n
      for n in range(1, heads + 1)
      if heads % n == 0 and (n == 1 or n * rows <= ROWS)
  )


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


def _walk(walk, pos, q, kv, *rest, shape, picks, sinks, capacity, together):
  """Grid (K / together, tiles): one tile of some KV heads."""
  *more, out, lse, pages, sems = rest
  chosen = more[0] if picks else None
  sink = more[-1] if sinks else None
  windowed = shape.form.window is not None
  head = pl.program_id(0)
  count = walk[0, 0, 0, 0]
  both = 2 * shape.width
  start = head * together * both
  if not nx.interpret():
    start = pl.multiple_of(start, LANES)
  lanes = pl.ds(start, together * both)
  at_once = _walk_pages()
  current_slot = 2 * at_once

  def copy(place, slot):
    source = kv.at[walk[0, 0, 0, 1 + place], :, lanes]
    return pltpu.make_async_copy(source, pages.at[slot], sems.at[slot])

  def fetch(step):
    """The copies of a step; past the list the last past page comes again."""
    base = lax.rem(step, 2) * at_once
    return [
        copy(jnp.minimum(step * at_once + u, count - 2), base + u)
        for u in range(at_once)
    ]

  total = q.shape[2]
  blocks = [pl.ds(r, min(ROWS, total - r)) for r in range(0, total, ROWS)]
  # Where several heads share the lanes, there is one block.
  owners = None
  if together > 1:
    row = lax.div(_iota((1, total), 1), total // together)
    owners = [row == i for i in range(together)]
    query = q[0, 0]
    of_row = lax.div(_iota((total, 1), 0), total // together)
    queries = [
        [
            jnp.where(of_row == i, query, jnp.zeros_like(query))
            for i in range(together)
        ]
    ]
  else:
    queries = [[q[0, 0, rows]] for rows in blocks]

  def split(page):
    return [page[:, i * both : (i + 1) * both] for i in range(together)]

  steps = lax.div(count - 1 + at_once - 1, at_once)
  offsets = _iota((shape.page, 1), 0)

  def in_window(number, rows):
    bound = shape.bound(pos[0, :, rows], number)
    return number * shape.page + offsets > bound

  def visit(step, states):
    for c in fetch(step):
      c.wait()

    @pl.when(step + 1 < steps)
    def _():
      for c in fetch(step + 1):
        c.start()

    base = lax.rem(step, 2) * at_once
    for u in range(at_once):
      place = step * at_once + u
      number = walk[0, 0, 0, 1 + capacity + jnp.minimum(place, count - 2)]
      page = split(pages[base + u])
      for i, rows in enumerate(blocks):
        here = jnp.full((1, rows.size), place, jnp.int32) < count - 1
        if chosen is not None:
          hit = jnp.where(chosen[0, 0, :, rows] == number, 1.0, 0.0)
          here &= hit.max(0, keepdims=True) > 0
        seen = in_window(number, rows) if windowed else None
        states[i] = shape.step(states[i], queries[i], page, seen, here, owners)
    return states

  @pl.when(count > 0)
  def _():
    last = copy(count - 1, current_slot)
    last.start()

    @pl.when(count > 1)
    def _():
      for c in fetch(0):
        c.start()

    states = [
        shape.start(rows.size, None if sink is None else sink[0, :, rows])
        for rows in blocks
    ]
    states = lax.fori_loop(0, steps, visit, states)
    last.wait()
    number = walk[0, 0, 0, 1 + capacity + count - 1]
    inside = pos[0] - number * shape.page
    # A slot that nobody wrote may hold anything, and 0 · NaN is NaN.
    written = offsets <= jnp.max(inside)
    page = pages[current_slot]
    page = split(jnp.where(written, page, jnp.zeros_like(page)))
    for i, rows in enumerate(blocks):
      seen = offsets <= pos[0, :, rows] - number * shape.page
      if windowed:
        seen &= in_window(number, rows)
      state = shape.step(states[i], queries[i], page, seen, None, owners)
      out[0, 0, rows], lse[0, 0, :, rows] = shape.finish(state)

  @pl.when(count == 0)
  def _():
    out[0, 0] = jnp.zeros(out.shape[2:], out.dtype)
    lse[0, 0] = jnp.zeros(lse.shape[2:], nx.F32)


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
    for j, diagonal, edge, other in plan:
      off = (j - back) * page
      seen = None
      if diagonal:
        seen = ahead >= off
      if edge:
        near = ahead < window + off
        seen = near if seen is None else seen & near
      mine = begin <= start + j - back if other else None
      state = shape.step(state, [query], [pages[j]], seen, mine)
    o, e = shape.finish(state)
    out[0, 0, part] = o
    lse[0, 0, :, part] = e
