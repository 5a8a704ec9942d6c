"""Block selection as TPU kernels: means of pages, and a running top-k over them.

The mean keys of a sequence and KV head stay in VMEM while its query tiles pass.
A step takes up to 128 tokens, walks the past pages 128 at a time and keeps the
best so far in order of falling score, so [T, pages] scores are never built. A
chunk costs rounds only while it holds a page that is better than the last one
kept. Scores are turned for that, [pages, tokens]: a maximum over pages is one
over whole registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import lanes
from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import layout as tiles_lib

CHUNK = lanes.LANES  # page means that a step looks at
TOKENS = lanes.LANES  # of a step, at most
ROWS = 128  # height of every product of queries and means, or one tile's rows
MEANS_BLOCK = 1 << 20  # numbers in a block of pages
MEANS_BYTES = 24 << 20  # of mean keys in VMEM, held twice
VMEM_BYTES = 60 << 20

_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))


def _means_kernel(kv_ref, means_ref, *, numerics):
  pages, size, _, _ = kv_ref.shape
  width = means_ref.shape[-1]

  def page(i, _):
    x = kv_ref[i, :, :, :width].astype(nx.F32)  # [C, K, H]
    # `tree_sum` along the first axis: whole registers are added.
    half = lanes.power_of_two(size)
    if half != size:
      rest = jnp.zeros((half - size, *x.shape[1:]), nx.F32)
      x = jnp.concatenate([x, rest], 0)
    while half > 1:
      half //= 2
      x = x[:half] + x[half:]
    means_ref[i] = numerics.keep(x[0] * (1 / size))
    return _

  lax.fori_loop(0, pages, page, 0)


def page_means(kv_MCKh, numerics):
  """See `ops.page_means`."""
  count, size, heads, width = kv_MCKh.shape
  page = size * lanes.round_up(heads, 8) * lanes.round_up(width, lanes.LANES)
  block = max(1, min(8, MEANS_BLOCK // page))
  return pl.pallas_call(
      functools.partial(_means_kernel, numerics=numerics),
      grid=(pl.cdiv(count, block),),
      in_specs=[
          pl.BlockSpec((block, size, heads, width), lambda i: (i, 0, 0, 0))
      ],
      out_specs=pl.BlockSpec((block, heads, width // 2), lambda i: (i, 0, 0)),
      out_shape=jax.ShapeDtypeStruct((count, heads, width // 2), nx.F32),
      interpret=nx.interpret(),
      name='page_means',
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel',), vmem_limit_bytes=VMEM_BYTES
      ),
  )(lax.stop_gradient(kv_MCKh))


def _insert(m, page, best, pages):
  """Inserts a row of scores into lists of falling score, behind equals."""
  place = lax.broadcasted_iota(jnp.int32, best.shape, 0)
  shift = lambda x: pltpu.roll(x, 1, 0)
  ahead = best >= m
  here = (place == 0) | (shift(best) >= m)
  put = lambda x, new: jnp.where(ahead, x, jnp.where(here, new, shift(x)))
  return put(best, m), put(pages, page)


def _select_kernel(
    bank_ref,
    low_ref,
    high_ref,
    q_ref,
    facts_ref,
    *refs,  # mean keys, for all units or for each; the result
    group,
    numerics,
):
  del bank_ref  # steers the blocks of means
  *means_refs, out_ref = refs
  step = pl.program_id(1)
  units, rows, width = q_ref.shape
  tokens, topk = facts_ref.shape[1], out_ref.shape[0]
  first, before = facts_ref[0:1, :], facts_ref[1:2, :]  # [1, tokens]
  # A product has one height, of which a single tile fills a part.
  spare = jnp.zeros((max(ROWS - rows, 0), width), q_ref.dtype)

  def scores(unit, at):
    q = q_ref[unit]
    if spare.shape[0]:
      q = jnp.concatenate([q, spare], 0)
    means = means_refs[unit % len(means_refs)][pl.ds(at, CHUNK), :]
    s = numerics.keep(numerics.dot(q, means, _ROWS_BY_ROWS))
    # Rows are (head of the group, token), and heads are added.
    count = rows // group
    return lanes.tree_add(
        [s[i * count : (i + 1) * count] for i in range(group)]
    )

  def chunk(c, lists):
    at = pl.multiple_of(c * CHUNK, CHUNK)
    s = jnp.concatenate([scores(unit, at) for unit in range(units)], 0).T
    page = lax.broadcasted_iota(jnp.int32, s.shape, 0) + at
    past = (page >= first) & (page < first + before)
    s = jnp.where(past, s, -jnp.inf)

    def take(_, carry):
      s, best, pages = carry
      m = jnp.max(s, 0, keepdims=True)
      top = jnp.where(s == m, page, jnp.iinfo(jnp.int32).max)
      top = jnp.min(top, 0, keepdims=True)
      best, pages = _insert(m, top, best, pages)
      return jnp.where(page == top, -jnp.inf, s), best, pages

    # No token can gain more pages than the chunk has better ones.
    better = jnp.where(s > lists[0][topk - 1 : topk], 1, 0)
    rounds = jnp.minimum(jnp.max(jnp.sum(better, 0, keepdims=True)), topk)
    return lax.fori_loop(0, rounds, take, (s, *lists))[1:]

  shape = (lanes.round_up(topk, 8), tokens)
  lists = jnp.full(shape, -jnp.inf, nx.F32), jnp.zeros(shape, jnp.int32)
  lists = lax.fori_loop(low_ref[step], high_ref[step], chunk, lists)
  best, pages = (x[:topk] for x in lists)
  out_ref[...] = jnp.where(best > -jnp.inf, pages - first, -1)


def _banks(means_MKH, layout, page_size, dtype):
  """Returns mean keys by sequence, and where each tile's sequence is in them.

  Returns:
    [banks, K, W, H], W a multiple of CHUNK; int32 [tiles] bank of each tile and
    int32 [tiles] place of its sequence's first page.

  Raises:
    ValueError: if a bank does not fit in VMEM.
  """
  table = layout.page_table_SW
  rows = tiles_lib.to_tiles(layout.sequences_T, layout).max(-1)
  if layout.row_length is None:
    means = means_MKH[table]
    bank, first = rows, jnp.zeros_like(rows)
  else:  # the pool is the rows, and a row's sequences lie in it in order
    pages = layout.row_length // page_size
    means = means_MKH.reshape(-1, pages, *means_MKH.shape[1:])
    bank, first = jnp.divmod(table[:, 0][rows], pages)
  means = means.astype(dtype).transpose(0, 2, 1, 3)
  pages = lanes.round_up(means.shape[2], CHUNK)
  means = jnp.pad(means, [(0, 0)] * 2 + [(0, pages - means.shape[2]), (0, 0)])
  if _bytes(means) > MEANS_BYTES and nx.platform() == 'tpu':
    raise ValueError(
        f'page_size={page_size}: {pages} pages of a sequence have'
        f' {_bytes(means)} bytes of mean keys, at most {MEANS_BYTES} are'
        ' allowed; larger pages make fewer'
    )
  return means, bank.astype(jnp.int32), first.astype(jnp.int32)


def _bytes(means):
  """Of one bank and head in VMEM."""
  pages, width = means.shape[2:]
  return pages * lanes.round_up(width, lanes.LANES) * means.dtype.itemsize


def _divisor(n: int, limit: int) -> int:
  """Returns the largest divisor of n that is at most `limit`, or 1."""
  return max(d for d in range(1, max(limit, 1) + 1) if n % d == 0)


def _units(layout, group, means):
  """How much a step does.

  Returns:
    Tiles of a product, products of a step. The learner's tiles share a row of
    mean keys, an engine's are alone with those of their sequence.
  """
  tile = tiles_lib.QUERY_TILE
  if layout.row_length is None:
    return 1, max(1, min(TOKENS // tile, MEANS_BYTES // _bytes(means)))
  tiles = layout.row_length // tile
  together = _divisor(tiles, ROWS // (tile * group))
  return together, _divisor(tiles // together, TOKENS // (tile * together))


def select_pages(q_TNH, means_MKH, layout, page_size, topk, numerics):
  """See `ops.select_pages`."""
  heads, width = means_MKH.shape[1:]
  group = q_TNH.shape[1] // heads
  means, bank, first = _banks(
      lax.stop_gradient(means_MKH), layout, page_size, q_TNH.dtype
  )
  together, units = _units(layout, group, means)
  count = len(bank)
  spare = -count % (together * units)
  fill = lambda x, value: jnp.pad(
      x, [(0, spare)] + [(0, 0)] * (x.ndim - 1), constant_values=value
  )
  unit = together * tiles_lib.QUERY_TILE
  q = fill(tiles_lib.to_tiles(lax.stop_gradient(q_TNH), layout), 0)
  q = q.reshape(-1, units, unit, heads, group, width)
  steps = q.shape[0]
  q = q.transpose(3, 0, 1, 4, 2, 5)
  q = q.reshape(heads, steps, units, group * unit, width)
  before = tiles_lib.to_tiles(layout.positions_T, layout, fill=-1) // page_size
  before = jnp.maximum(fill(before, 0), 0).astype(jnp.int32)
  first = jnp.broadcast_to(fill(first, 0)[:, None], before.shape)
  facts = jnp.stack([first.reshape(steps, -1), before.reshape(steps, -1)], 1)
  first, before = facts[:, 0], facts[:, 1]
  low = jnp.where(before > 0, first, jnp.iinfo(jnp.int32).max).min(-1)
  high = jnp.where(before > 0, first + before, 0).max(-1)
  banks = 1 if layout.row_length is not None else units
  bank = fill(bank, 0)[:: together * units // banks]

  def means_spec(j):
    return pl.BlockSpec(
        (None, None, means.shape[2], width),
        lambda k, i, bank, *_: (bank[i * banks + j], k, 0, 0),
    )

  out = pl.pallas_call(
      functools.partial(_select_kernel, group=group, numerics=numerics),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=3,
          grid=(heads, steps),
          in_specs=[
              pl.BlockSpec(
                  (None, None, *q.shape[2:]), lambda k, i, *_: (k, i, 0, 0, 0)
              ),
              pl.BlockSpec(
                  (None, *facts.shape[1:]), lambda k, i, *_: (i, 0, 0)
              ),
              *map(means_spec, range(banks)),
          ],
          out_specs=pl.BlockSpec(
              (None, None, topk, units * unit), lambda k, i, *_: (k, i, 0, 0)
          ),
      ),
      out_shape=jax.ShapeDtypeStruct(
          (heads, steps, topk, units * unit), jnp.int32
      ),
      interpret=nx.interpret(),
      name='select_pages',
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'arbitrary'),
          vmem_limit_bytes=VMEM_BYTES,
      ),
  )(bank, low // CHUNK, pl.cdiv(high, CHUNK), q, facts, *[means] * banks)
  out = out.transpose(1, 3, 0, 2)
  out = out.reshape(-1, tiles_lib.QUERY_TILE, heads, topk)[:count]
  return tiles_lib.from_tiles(out, layout)
