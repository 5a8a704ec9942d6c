"""Block selection: by hand, ties, missing pages, equal bits in any stream."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.block_selection import ops
from kernels_pallas.paged_attention import layout as layouts
from tests.kernels import samples
from tests.kernels import streams

DTYPES = samples.DTYPES
PAGE = streams.PAGE
ALL = ['reference', 'xla', 'pallas']
FAST = ['xla', 'pallas']


@functools.cache
def select(dtype='float32', topk=2, impl='xla', page=PAGE):
  num = samples.EXACT[dtype]

  def run(q, kv, layout):
    means = ops.page_means(kv, numerics=num, impl=impl)
    return ops.select_pages(
        q,
        means,
        layout,
        page_size=page,
        topk=topk,
        numerics=num,
        impl=impl,
    )

  return nx.jit(run)


@functools.cache
def choose(topk, impl):
  """(q, means, layout) -> pages of size 8."""

  def run(q, means, layout):
    return ops.select_pages(
        q,
        means,
        layout,
        page_size=8,
        topk=topk,
        numerics=samples.EXACT['float32'],
        impl=impl,
    )

  return nx.jit(run)


@pytest.mark.parametrize('impl', ALL)
def test_means_by_hand(impl):
  kv = np.full((2, 8, 1, 4), np.nan, np.float32)
  kv[0, :, 0, 0] = np.arange(8)
  kv[0, :, 0, 1] = 3
  num = samples.EXACT['float32']
  means = nx.jit(lambda kv: ops.page_means(kv, numerics=num, impl=impl))(kv)
  np.testing.assert_array_equal(means[0, 0], [3.5, 3])


@pytest.mark.parametrize('impl', ALL)
def test_by_hand(impl):
  """One sequence of five pages of 8; the mean of page w is scores[w]."""
  layout = layouts.row_layout(jnp.arange(40)[None], 8)

  def run(scores, topk=2, q=None):
    means = jnp.asarray(scores, jnp.float32).reshape(5, 1, 1)
    q = jnp.ones((40, 1, 1)) if q is None else q
    out = np.asarray(choose(topk, impl)(q, means, layout))
    assert out.dtype == np.int32
    return out[::8, 0].tolist()  # the first token of each page

  best = run([1, 3, 2, 5, 9])
  assert best == [[-1, -1], [0, -1], [1, 0], [1, 2], [3, 1]]
  # Ties go to the earlier page; an unfinished page's mean is never used.
  ties = run([4, 7, 7, 7, np.nan])
  assert ties == [[-1, -1], [0, -1], [1, 0], [1, 2], [1, 2]]
  assert run([2, 2, 2, 2, 2])[4] == [0, 1]
  # Scores below zero count, too: past pages are taken while there are any.
  assert run([-3, -1, -2, -9, 0])[4] == [1, 2]
  # More than there are pages at all.
  assert run([1, 3, 2, 5, 9], topk=7)[4] == [3, 1, 2, 0, -1, -1, -1]
  # Two query heads of a group are summed: 2 q₀ - q₁ = 1, -1, 0, 0.5.
  q = jnp.stack([jnp.full(40, 2.0), jnp.full(40, -3.0)], 1)[..., None]
  assert run([1, 3, 2, 5, 9], q=q)[4] == [0, 2]


def test_heads_choose_for_themselves():
  layout = layouts.row_layout(jnp.arange(32)[None], 8)
  means = jnp.asarray([[1.0, 3], [2, 2], [3, 1], [9, 9]])[..., None]
  for impl in ALL:
    out = choose(1, impl)(jnp.ones((32, 4, 1)), means, layout)
    np.testing.assert_array_equal(out[24], [[2], [0]])


def in_stream(data, dtype, chunks, impl='xla', seed=0, tiles=40):
  kv, table = streams.pool(data, seed)
  q, layout, place = streams.stream(data, table, chunks, 128, tiles)
  return streams.by_place(select(dtype, 2, impl)(q, kv, layout), place)


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
def test_equal_to_reference_and_pure(dtype, impl):
  """Every token, with NaN in unwritten slots, pages and padding."""
  lengths = (*streams.LENGTHS, 4 * PAGE)
  data = streams.world(dtype, lengths[:1] + lengths[2:])
  chunks = streams.whole(data)[1:] + [(0, 0, 1)]
  chunks = [(s, max(0, n - 40), min(n, 40)) for s, _, n in chunks]
  full = in_stream(data, dtype, chunks, impl)
  reference = in_stream(data, dtype, chunks, impl='reference')
  for key, row in full.items():
    np.testing.assert_array_equal(row, reference[key])
    past = key[1] // PAGE
    assert (row < past).all(), 'the current page is never in the list'
    assert ((row >= 0).sum(-1) == min(past, 2)).all()
  for seed in (1, 2):
    cut = streams.pieces(data, seed)[:20]
    out = in_stream(data, dtype, cut, impl, seed)
    assert full.keys() & out.keys()
    for key in full.keys() & out.keys():
      np.testing.assert_array_equal(out[key], full[key])
  # The learner's rows choose the same pages.
  q, kv, layout, place = streams.packed(data, [[0, 3], [1, 2, 0], [4]], 80)
  rows = streams.by_place(select(dtype, impl=impl)(q, kv, layout), place)
  for key, row in full.items():
    np.testing.assert_array_equal(rows[key], row)


def long_row(lengths, group=2, ties=False, seed=0):
  """One row of sequences with pages of 8, its queries and its page means."""
  total = sum(lengths)
  positions = np.concatenate([np.arange(n) for n in lengths])[None]
  q = samples.normal(seed, (total, 2 * group, 8))
  means = samples.normal(seed + 1, (total // 8, 2, 8))
  if ties:  # products of these are exact in any order
    q, means = np.round(q), np.round(means)
  return q, means, layouts.row_layout(jnp.asarray(positions), 8)


@pytest.mark.parametrize(
    ('topk', 'group', 'ties'),
    [(16, 4, False), (16, 4, True), (130, 1, True), (3, 3, True)],
)
def test_many_pages(topk, group, ties):
  """Several chunks of pages, sequences that start within a chunk, ties."""
  q, means, layout = long_row((8 * 45, 8 * 300, 8 * 3), group, ties)
  expected = np.asarray(choose(topk, 'reference')(q, means, layout))
  actual = np.asarray(choose(topk, 'pallas')(q, means, layout))
  np.testing.assert_array_equal(actual, expected)
  assert actual.max() > 256


def test_a_sequence_chooses_alike_wherever_it_lies():
  """In front of a row, behind another sequence, token by token in the engine."""
  q, means, layout = long_row((8 * 200,), group=4)
  alone = np.asarray(choose(16, 'pallas')(q, means, layout))
  before, before_means, _ = long_row((8 * 77,), group=4, seed=5)
  positions = np.concatenate([np.arange(8 * 77), np.arange(8 * 200)])[None]
  behind = choose(16, 'pallas')(
      np.concatenate([before, q]),
      np.concatenate([before_means, means]),
      layouts.row_layout(jnp.asarray(positions), 8),
  )
  np.testing.assert_array_equal(behind[8 * 77 :], alone)
  tokens = np.asarray([5, 8 * 130 + 3, 8 * 199 + 7, 8 * 64])
  order = np.random.default_rng(0).permutation(200)
  pool = np.full((201, 2, 8), np.nan, np.float32)
  pool[order] = means
  lanes = np.full((4, layouts.QUERY_TILE), len(tokens), np.int32)
  lanes[np.arange(4), tokens % 8] = np.arange(4)
  engine = layouts.Layout(
      jnp.asarray(tokens),
      jnp.zeros(4, jnp.int32),
      jnp.asarray(order)[None],
      jnp.asarray(lanes),
      jnp.asarray(np.arange(4) * 8 + tokens % 8),
  )
  drawn = choose(16, 'pallas')(q[tokens], pool, engine)
  np.testing.assert_array_equal(drawn, alone[tokens])


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
def test_means_are_pure(dtype, impl):
  num = samples.EXACT[dtype]
  fun = nx.jit(lambda kv: ops.page_means(kv, numerics=num, impl=impl))
  kv = samples.normal(0, (9, PAGE, 2, 16), dtype)
  means = np.asarray(fun(kv))
  samples.same_bits(fun(kv[::-1]), means[::-1])
  samples.same_bits(fun(kv[4:5]), means[4:5])
  samples.close(means, kv[..., :8].mean(1))


@pytest.mark.parametrize('size', [8, 24, 128])
def test_means_of_a_kernel_have_the_same_bits(size):
  kv = samples.normal(0, (11, size, 2, 16))
  a, b = (
      nx.jit(
          functools.partial(
              ops.page_means, numerics=samples.EXACT['float32'], impl=impl
          )
      )(kv)
      for impl in FAST
  )
  samples.same_bits(a, b)


@pytest.mark.parametrize(
    ('change', 'match'),
    [
        (dict(topk=0), 'topk=0: at least 1'),
        (dict(page_size=0), 'page_size=0: at least 1'),
        (dict(q=(32, 3, 8)), r'q_TNH \(32, 3, 8\) and means_MKH \(4, 2, 8\)'),
        (dict(q=(32, 4, 6)), r'q_TNH \(32, 4, 6\) and means_MKH'),
        (dict(impl='cuda'), "impl='cuda' of select_pages: allowed"),
    ],
)
def test_bad_input(change, match):
  options = dict(topk=1, page_size=8) | change
  q = jnp.zeros(options.pop('q', (32, 4, 8)))
  layout = layouts.row_layout(jnp.arange(32)[None], 8)
  with pytest.raises(ValueError, match=match):
    ops.select_pages(
        q, jnp.zeros((4, 2, 8)), layout, numerics=samples.FREE, **options
    )


def test_bad_pages():
  with pytest.raises(ValueError, match=r'kv_MCKh \(4, 16, 7\): expected'):
    ops.page_means(jnp.zeros((4, 16, 7)), numerics=samples.FREE)


def test_mean_keys_must_fit_on_the_chip():
  def run(q, means, positions):
    layout = layouts.row_layout(positions, 8)
    return choose(1, 'pallas')(q, means, layout)

  shapes = (8 << 17, 1, 128), (1 << 17, 1, 128), (1, 8 << 17)
  args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes[:2]]
  args.append(jax.ShapeDtypeStruct(shapes[2], jnp.int32))
  with nx.target('tpu'), pytest.raises(ValueError, match='page_size=8: 131072'):
    jax.eval_shape(run, *args)
