"""Paged attention: by hand, against one softmax, in rows, in bits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import form as forms
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.paged_attention import ops
from kernels_pallas.paged_attention import pallas_tpu
from kernels_pallas.paged_attention import pallas_tpu_backward as backward_tpu
from tests.kernels import samples
from tests.kernels import streams

WINDOW, TOPK, CAP = 11, 2, 2.0
# 'block' and 'sink' say which arguments are passed, the rest are options.
MODES = {
    'full': dict(),
    'window': dict(window=WINDOW),
    'block': dict(block=True),
    'full sink cap': dict(sink=True, soft_cap=CAP),
    'window sink cap': dict(window=WINDOW, sink=True, soft_cap=CAP),
    'window sink page': dict(window=WINDOW, sink=True, sink_page=True),
    'block all': dict(block=True, sink=True, soft_cap=CAP, sink_page=True),
}
PLAIN = ('full', 'window', 'block')
# The same rows give the same bits, so a few of the pairs will do by default.
FAST = {('xla', dtype, mode) for dtype in samples.DTYPES for mode in PLAIN}
FAST |= {
    ('xla', 'float32', 'block all'),
    ('xla', 'bfloat16', 'window sink page'),
    ('pallas', 'float32', 'block all'),
}
CASES = [
    pytest.param(
        dtype,
        impl,
        mode,
        marks=[pytest.mark.slow] * ((impl, dtype, mode) not in FAST),
    )
    for impl in ('xla', 'pallas')
    for dtype in samples.DTYPES
    for mode in MODES
]
SINKS = np.asarray([0.3, -1.5, 2.5, 0.0], np.float32)
PACK = [[0, 4], [1, 2, 3], [3, 0]]  # rows of 5, 4 and 3 pages


def chosen(place, count):
  """Some past pages of each token, differing between heads; a fixed rule."""
  out = np.full((count, streams.KV_HEADS, TOPK), -1, np.int32)
  for i, p in enumerate(place):
    past = p[1] // streams.PAGE if p else 0
    for head in range(streams.KV_HEADS if past else 0):
      first = (p[1] + head) % past
      out[i, head, 0] = first
      if past > 1 and p[1] % 3:
        out[i, head, 1] = (first + 1) % past
  return jnp.asarray(out)


def attention(dtype, mode, impl='xla', direct=False):
  """Returns (q, kv, sink, layout, selected) -> out."""
  num = samples.EXACT[dtype]
  options = dict(MODES[mode])
  block, with_sink = options.pop('block', False), options.pop('sink', False)

  def run(q, kv, sink, layout, selected):
    selected = selected if block else None
    sink = sink if with_sink else None
    if direct:  # differentiable as it stands
      if block and options.get('sink_page'):
        first = jnp.zeros_like(selected[..., :1])
        selected = jnp.concatenate([first, selected], -1)
      form = forms.Form(**options)
      return ops.reference.attend(q, kv, layout, selected, sink, form, num)[0]
    return ops.paged_attention(
        q,
        kv,
        layout,
        numerics=num,
        selected_TKj=selected,
        sink_N=sink,
        impl=impl,
        **options,
    )

  return run


@functools.cache
def attend(dtype, mode, impl='xla'):
  return nx.jit(attention(dtype, mode, impl))


@functools.cache
def gradients(dtype, mode, impl='xla', direct=False):
  """Compiled (q, kv, g, layout, selected) -> out, (dq, dkv, dsink)."""
  fun = attention(dtype, mode, impl, direct)

  def run(q, kv, g, layout, selected):
    of = lambda *inputs: fun(*inputs, layout, selected)
    value, pull = jax.vjp(of, q, kv, jnp.asarray(SINKS))
    return value, pull(g)

  return nx.jit(run)


def in_stream(data, dtype, mode, chunks, *, impl='xla', seed=0, tiles=40):
  kv, table = streams.pool(data, seed)
  q, layout, place = streams.stream(data, table, chunks, 128, tiles)
  selected = chosen(place, 128)
  out = attend(dtype, mode, impl)(q, kv, SINKS, layout, selected)
  assert not np.any(np.asarray(out)[len(place) :]), 'rows in no tile are zero'
  return streams.by_place(out, place)


def in_rows(data, dtype, mode, *, impl='xla', fill=0.0, pack=PACK):
  q, kv, layout, place = streams.packed(data, pack, 80, fill)
  selected = chosen(place, len(q))
  out = attend(dtype, mode, impl)(q, kv, SINKS, layout, selected)
  return streams.by_place(out, place)


def same(a, b):
  for key in a.keys() & b.keys():
    samples.same_bits(a[key], b[key])


# By hand.


def hand(keys, values, query, position, table=((1, 0),), **options):
  """One query of width 4 over pages of 8; impl by impl."""
  kv = np.full((5, 8, 1, 8), np.nan, np.float32)
  for i, (k, v) in enumerate(zip(keys, values)):
    kv[table[0][i // 8], i % 8, 0] = [k, 0, 0, 0, v, 0, 0, 0]
  tiles = np.full((1, 8), 8, np.int32)
  tiles[0, position % 8] = 0
  place = np.full(8, 8, np.int32)
  place[0] = position % 8
  layout = layouts.Layout(
      jnp.full(8, position),
      jnp.zeros(8, jnp.int32),
      jnp.asarray(table),
      jnp.asarray(tiles),
      jnp.asarray(place),
  )
  q = np.zeros((8, 1, 4), np.float32)
  q[0, 0, 0] = query
  selected, sink = options.pop('selected_TKj', None), options.pop('sink', None)
  sink = None if sink is None else jnp.asarray([sink], jnp.float32)
  run = compiled(**options)
  return float(run(q, kv, layout, selected, sink)[0, 0, 0])


@functools.cache
def compiled(**options):
  num = samples.EXACT['float32']
  return nx.jit(
      lambda q, kv, layout, selected, sink: ops.paged_attention(
          q,
          kv,
          layout,
          numerics=num,
          selected_TKj=selected,
          sink_N=sink,
          **options,
      )
  )


@pytest.mark.parametrize('impl', ['reference', 'xla', 'pallas'])
def test_by_hand(impl):
  log2 = 2 * math.log(2)  # divided by √4, a key of 1 doubles the weight
  run = functools.partial(hand, impl=impl)
  assert run([5.0], [7.0], log2, 0) == pytest.approx(7)
  assert run([0, 1], [3, 6], log2, 1) == pytest.approx(5)
  # Not yet visible keys have no part; weights 1 : 2 : 4.
  assert run([0, 1, 2, 9], [7, 14, 21, 99], log2, 2) == pytest.approx(17)
  # Nine keys lie on two pages; the ninth weighs 8.
  values = [1.0] * 8 + [10.0]
  assert run([0] * 8 + [3], values, log2, 8) == pytest.approx(5.5)
  window = functools.partial(run, [0] * 9, list(range(9)), 1.0, 8)
  assert window(window=1) == pytest.approx(8)
  assert window(window=2) == pytest.approx(7.5)
  assert window(window=50) == pytest.approx(4)
  pick = lambda page: jnp.full((8, 1, 1), page)
  assert window(selected_TKj=pick(-1)) == pytest.approx(8)
  assert window(selected_TKj=pick(0)) == pytest.approx(4)


@pytest.mark.parametrize('impl', ['reference', 'xla', 'pallas'])
def test_sinks_and_caps_by_hand(impl):
  log2 = 2 * math.log(2)
  run = functools.partial(hand, impl=impl)
  # Weights: key 1, sink 1, so half of the value is gone.
  assert run([0], [6], 1.0, 0, sink=0.0) == pytest.approx(3)
  # Weights: keys 1 and 2, sink 3.
  keys = functools.partial(run, [0, 1], [3, 9], log2, 1)
  assert keys(sink=math.log(3)) == pytest.approx((3 + 18) / 6)
  assert keys(sink=-math.inf) == pytest.approx(7)  # as without
  assert keys(sink=1000.0) == 0
  # q · k / √4 is 3; a cap of 1.5 makes it 1.5 tanh(2), a weight of 4.2454.
  weight = math.exp(1.5 * math.tanh(2.0))
  capped = functools.partial(run, [0, 6], [1, 2], 1.0, 1, soft_cap=1.5)
  expected = (1 + 2 * weight) / (1 + weight)
  assert capped(sink=-math.inf) == pytest.approx(expected)
  # Sinks are not capped.
  expected = (1 + 2 * weight) / (1 + weight + 8)
  assert capped(sink=math.log(8)) == pytest.approx(expected)


@pytest.mark.parametrize('impl', ['reference', 'xla', 'pallas'])
def test_a_sink_page_by_hand(impl):
  """Equal weights, so the value is the mean of what is seen."""
  values = [float(v) for v in range(25)]
  run = functools.partial(
      hand, [0] * 25, values, 1.0, table=((1, 0, 3, 2),), impl=impl
  )
  first, own = range(8), [24]
  mean = lambda *parts: np.mean([v for part in parts for v in part])
  page = functools.partial(run, 24, sink_page=True)
  assert page(window=3) == pytest.approx(mean(first, [22, 23, 24]))
  # The window reaches into page 0: nothing counts twice.
  assert page(window=20) == pytest.approx(mean(range(25)))
  pick = lambda *pages: jnp.broadcast_to(jnp.asarray(pages), (8, 1, 3))
  picks = lambda *pages: page(selected_TKj=pick(*pages))
  assert picks(2, -1, -1) == pytest.approx(mean(first, range(16, 25)))
  assert picks(-1, -1, -1) == pytest.approx(mean(first, own))
  # Selected as well, even twice: still counted once.
  assert picks(0, -1, -1) == pytest.approx(mean(first, own))
  assert picks(0, 2, 0) == pytest.approx(mean(first, range(16, 25)))
  # In its own page a token sees the past only.
  options = dict(selected_TKj=pick(0, -1, -1)), dict(window=3)
  at_two = [run(2, sink_page=True, **o) for o in options]
  assert at_two == [pytest.approx(1), pytest.approx(1)]


def test_tanh_is_pure():
  """Vectors and what remains of them, alone and fused, have the same bits."""
  x = 3 * samples.normal(0, (4096,))
  num = samples.EXACT['float32']
  x[::5] *= 3e-3  # some near zero
  np.testing.assert_allclose(
      nx.jit(num.tanh)(x), np.tanh(x.astype(np.float64)), rtol=1e-5, atol=1e-7
  )
  cap = lambda x: num.keep(CAP * num.tanh(x))
  whole = np.asarray(nx.jit(cap)(x))
  fused = nx.jit(lambda x: (cap(x), cap(x) * 3 + 1, jnp.exp(cap(x) - x)))
  for count in (1, 2, 3, 5, 7, 9, 15, 17, 1003):
    for start in (0, 1, 3):
      part = slice(start, start + count)
      samples.same_bits(nx.jit(cap)(x[part]), whole[part])
      if count in (1, 7, 17):
        samples.same_bits(fused(x[part])[0], whole[part])


def test_reference_groups_heads():
  """Query heads 0 and 1 read KV head 0, heads 2 and 3 read KV head 1."""
  data = streams.world(lengths=(1,))
  out = in_stream(data, 'float32', 'full', [(0, 0, 1)], impl='reference')[0, 0]
  values = data.kv[0][0, :, streams.WIDTH :]
  np.testing.assert_allclose(out, values[[0, 0, 1, 1]], rtol=1e-6)


# Against the reference; pools are full of NaN where nobody wrote.


@pytest.mark.parametrize(('dtype', 'impl', 'mode'), CASES)
def test_stream_values(dtype, impl, mode):
  data = streams.world(dtype)
  chunks = streams.whole(data)
  ours = in_stream(data, dtype, mode, chunks, impl=impl)
  expected = in_stream(data, 'float32', mode, chunks, impl='reference')
  assert len(ours) == sum(data.lengths)
  for key, row in expected.items():
    samples.close(ours[key], row, dtype)


@pytest.mark.parametrize(('dtype', 'impl', 'mode'), CASES)
def test_row_values_and_gradients(dtype, impl, mode):
  data = streams.world(dtype)
  q, kv, layout, place = streams.packed(data, PACK, 80)
  g = np.array(samples.normal(9, q.shape, dtype))
  g[[i for i, p in enumerate(place) if p is None]] = 0  # padding has no loss
  selected = chosen(place, len(q))
  out, grads = gradients(dtype, mode, impl)(q, kv, g, layout, selected)
  reference = gradients('float32', mode, direct=True)
  expected, expected_grads = reference(q, kv, g, layout, selected)
  ours, theirs = (streams.by_place(x, place) for x in (out, expected))
  for key, row in theirs.items():
    samples.close(ours[key], row, dtype)
  with_sink = 'sink' in MODES[mode]
  for a, b, used in zip(grads, expected_grads, (True, True, with_sink)):
    samples.close(a, b, dtype)
    assert (np.abs(np.asarray(a)).max() > 0.1) == used
  # The gradient program's own forward has the bits of the plain one.
  plain = attend(dtype, mode, impl)(q, kv, SINKS, layout, selected)
  samples.same_bits(out, plain)


@pytest.mark.parametrize('mode', ['full', 'block all'])
def test_gradients_of_many_pages(mode):
  """The TPU's kernel takes some pages at once, and the rest one by one."""
  assert backward_tpu.AT_ONCE < 10
  data = streams.world(lengths=(10 * streams.PAGE + 3, 7 * streams.PAGE))
  q, kv, layout, place = streams.packed(data, [[0, 1]], 18 * streams.PAGE)
  g = np.array(samples.normal(9, q.shape))
  g[[i for i, p in enumerate(place) if p is None]] = 0
  args = q, kv, g, layout, chosen(place, len(q))
  _, grads = gradients('float32', mode, 'pallas')(*args)
  _, expected = gradients('float32', mode, direct=True)(*args)
  for a, b in zip(grads, expected):
    samples.close(a, b)


def test_gradients_of_pages_longer_than_a_block_of_queries(monkeypatch):
  data = streams.world()
  q, kv, layout, place = streams.packed(data, PACK, 80)
  args = q, kv, samples.normal(9, q.shape), layout, chosen(place, len(q))
  _, expected = gradients('float32', 'block')(*args)
  monkeypatch.setattr(ops.backward, 'QUERY_BLOCK', streams.PAGE // 2)
  _, grads = gradients.__wrapped__('float32', 'block')(*args)
  for a, b in zip(grads, expected):
    samples.close(a, b)


# Bits.


@pytest.mark.parametrize(('dtype', 'impl', 'mode'), CASES)
def test_a_row_is_pure(dtype, impl, mode):
  data = streams.world(dtype)
  stream = functools.partial(in_stream, data, dtype, mode, impl=impl)
  full = stream(streams.whole(data))
  # Other chunks in another order over other pages.
  for seed in (1, 2):
    out = stream(streams.pieces(data, seed), seed=seed)
    assert out.keys() == full.keys()
    same(out, full)
  # Single tokens, other company, another number of tiles.
  last = [(s, n - 1, 1) for s, n in reversed([*enumerate(data.lengths)])]
  same(stream(last, seed=3, tiles=7), full)
  # The learner's rows, whatever fills the padding.
  packed = functools.partial(in_rows, data, dtype, mode, impl=impl)
  rows = packed()
  assert rows.keys() == full.keys()
  same(rows, full)
  same(packed(fill=1e4), full)
  same(packed(pack=[[4], [2, 1], [0, 3]]), full)


@pytest.mark.parametrize(
    'mode',
    [
        'full',
        pytest.param('window sink page', marks=pytest.mark.slow),
        pytest.param('block all', marks=pytest.mark.slow),
    ],
)
def test_score_blocks_give_the_same_bits(mode, monkeypatch):
  """One for all heads of a tile, against two for each, as at real widths."""
  data = streams.world('bfloat16')
  one = in_stream(data, 'bfloat16', mode, streams.whole(data), impl='pallas')
  monkeypatch.setattr(pallas_tpu, 'LANES', 32)
  monkeypatch.setattr(pallas_tpu, 'ROWS', 16)
  blocks = pallas_tpu._blocks(streams.PAGE * 2, streams.KV_HEADS)
  assert blocks == [
      (0, 16, range(1)),
      (16, 16, range(1)),
      (32, 16, range(1, 2)),
      (48, 16, range(1, 2)),
  ]
  attend.cache_clear()
  try:
    same(in_rows(data, 'bfloat16', mode, impl='pallas'), one)
  finally:
    attend.cache_clear()


@pytest.mark.parametrize(
    ('plan', 'expected'),
    [  # page, K, G, learner, selection: tile, heads, blocks, rows, pages
        ((128, 4, 4, True, False), (128, 4, 8, 256, 1)),
        ((128, 4, 4, True, True), (64, 1, 1, 256, 8)),
        ((64, 4, 4, True, False), (64, 4, 4, 256, 2)),
        ((128, 1, 16, True, False), (128, 1, 8, 256, 1)),
        ((128, 4, 4, False, False), (8, 4, 1, 128, 8)),
        ((128, 8, 4, False, False), (8, 8, 2, 128, 4)),
        ((128, 8, 5, False, False), (8, 4, 1, 160, 8)),
        ((128, 4, 4, False, True), (8, 1, 1, 32, 8)),
    ],
)
def test_score_blocks(plan, expected):
  tile, together, blocks, at_once = pallas_tpu.walk_plan(*plan)
  (size,) = {size for _, size, _ in blocks}
  assert (tile, together, len(blocks), size, at_once) == expected
  covered = [r for first, n, _ in blocks for r in range(first, first + n)]
  assert covered == list(range(together * tile * plan[2]))


def test_gradients_are_deterministic():
  data = streams.world()
  q, kv, layout, place = streams.packed(data, PACK, 80)
  run = gradients('float32', 'block all', 'xla')
  args = q, kv, samples.normal(9, q.shape), layout, chosen(place, len(q))
  first = run(*args)
  for again in (run(*args), run(*args)):
    jax.tree.map(samples.same_bits, again, first)


def test_the_gradient_of_a_sink_by_hand():
  """o = v w / (w + e^b): ∂o/∂b = -v w e^b / (w + e^b)², here -6/4."""
  layout = layouts.row_layout(jnp.arange(8)[None], 8)
  q = jnp.zeros((8, 1, 4))
  kv = jnp.zeros((1, 8, 1, 8)).at[0, 0, 0, 4].set(6)
  num = samples.EXACT['float32']
  of = lambda sink: ops.paged_attention(
      q, kv, layout, numerics=num, sink_N=sink, impl='xla'
  )[0, 0, 0]
  assert nx.jit(jax.grad(of))(jnp.zeros(1))[0] == pytest.approx(-1.5)


@pytest.mark.parametrize('mode', MODES)
def test_a_nan_sequence_harms_no_other(mode):
  data = streams.world()
  clean = in_rows(data, 'float32', mode)
  data.q[4][:], data.kv[4][:] = np.nan, np.nan
  out = in_rows(data, 'float32', mode)
  assert np.isnan(out[4, 7]).all()
  for key in clean:
    if key[0] != 4:
      samples.same_bits(out[key], clean[key])


# Bad input.


def test_row_layout_by_hand():
  positions = jnp.asarray([[*range(16), *range(8)], [*range(8), *range(16)]])
  layout = layouts.row_layout(positions, 8)
  np.testing.assert_array_equal(layout.sequences_T[::8], [0, 0, 2, 3, 4, 4])
  np.testing.assert_array_equal(layout.page_table_SW[0], [0, 1, 2])
  np.testing.assert_array_equal(layout.page_table_SW[4], [4, 5, 5])
  moved = layout.shift_pages(10)
  np.testing.assert_array_equal(moved.page_table_SW[0], [10, 11, 12])


@pytest.mark.parametrize(
    ('shape', 'page', 'match'),
    [
        ((2, 24), 16, r'positions_BT \(2, 24\), page_size=16: rows must be'),
        ((2, 24), 12, r'page_size=12: .* whole tiles of 8'),
        ((2, 24), 0, r'page_size=0'),
        ((24,), 8, r'positions_BT \(24,\): expected \[B, T\]'),
    ],
)
def test_bad_row_layout(shape, page, match):
  with pytest.raises(ValueError, match=match):
    layouts.row_layout(jnp.zeros(shape, jnp.int32), page)


@pytest.mark.parametrize(
    ('change', 'match'),
    [
        (dict(q=(48, 4, 6)), r'q_TNH \(48, 4, 6\) and kv_MCKh'),
        (dict(q=(48, 4)), r'q_TNH \(48, 4\) and kv_MCKh'),
        (dict(q=(48, 3, 8)), '3 query heads, a multiple of the 2 KV heads'),
        (dict(kv=(4, 12, 2, 16)), 'pages of 12 tokens, a multiple of 8'),
        (dict(kv=(4, 16, 2, 16)), '4 pages of 16, but the rows hold 48'),
        (dict(kv=(3, 16, 16)), r'kv_MCKh \(3, 16, 16\)'),
        (dict(q=(40, 4, 8)), r'layout.positions_T \(48,\)'),
        (dict(window=0), 'window=0: at least 1, or None, is allowed'),
        (dict(window=4, selected=(48, 2, 1)), 'window=4: None is allowed'),
        (dict(soft_cap=-1.0), 'soft_cap=-1.0: a finite bound above 0'),
        (dict(soft_cap=math.inf), 'soft_cap=inf: a finite bound above 0'),
        (dict(soft_cap=math.nan), 'soft_cap=nan: a finite bound above 0'),
        (dict(sink=(2,)), r'sink_N \(2,\): q_TNH \(48, 4, 8\) needs \(4,\)'),
        (
            dict(selected=(48, 1, 1)),
            r'selected_TKj \(48, 1, 1\): expected \[48',
        ),
        (dict(impl='cuda'), "impl='cuda' of paged_attention: allowed"),
    ],
)
def test_bad_input(change, match):
  args = dict(q=(48, 4, 8), kv=(3, 16, 2, 16), selected=None, sink=None)
  args |= change
  layout = layouts.row_layout(jnp.arange(48).reshape(1, -1), 16)
  selected = args['selected'] and jnp.zeros(args['selected'], jnp.int32)
  with pytest.raises(ValueError, match=match):
    ops.paged_attention(
        jnp.zeros(args['q']),
        jnp.zeros(args['kv']),
        layout,
        numerics=samples.FREE,
        window=args.get('window'),
        selected_TKj=selected,
        sink_N=args['sink'] and jnp.zeros(args['sink']),
        soft_cap=args.get('soft_cap', 0.0),
        impl=args.get('impl', 'auto'),
    )
