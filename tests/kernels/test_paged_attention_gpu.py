"""Paged attention's GPU kernel, in the GPU interpreter.

The interpreter knows neither transposed tiles in shared memory
(`TransposeTransform`) nor factors in registers for `wgmma`: there the products
are plain ones, and all else, the walk, barriers, masks and sums, is the kernel
that `test_gpu_compile` compiles. It compiles the kernel anew for every tile and
thread, so there are few tiles here.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import backward
from kernels_pallas.paged_attention import ops
from kernels_pallas.paged_attention import pallas_gpu
from kernels_pallas.paged_attention import pallas_gpu_backward
from kernels_pallas.paged_attention.form import Form
from tests.kernels import samples
from tests.kernels import streams

NUM = samples.EXACT['bfloat16']
LENGTH, ROW = 2 * streams.PAGE + 8, 3 * streams.PAGE
WINDOW, TOPK = 11, 2
CHUNK, DECODE = (0, 30, 10), (0, 37, 1)  # sequence, start, count


@pytest.fixture(autouse=True)
def heads(monkeypatch):
  """Two warpgroups share a tile of packed rows, one has a tile of a stream."""
  monkeypatch.setattr(streams, 'HEADS', 8)
  monkeypatch.setattr(streams, 'KV_HEADS', 1)


def chosen(place, count):
  """Some past pages of each token, differing between heads."""
  out = np.full((count, streams.KV_HEADS, TOPK), -1, np.int32)
  for i, p in enumerate(place):
    past = p[1] // streams.PAGE if p else 0
    for head in range(streams.KV_HEADS if past else 0):
      out[i, head, 0] = (p[1] + head) % past
  return jnp.asarray(out)


@functools.cache
def attend(mode, impl):
  fun = {'gpu': pallas_gpu.attend, 'reference': ops.reference.attend}[impl]

  def run(q, kv, layout, selected):
    if impl == 'gpu':
      q, kv = q.astype(jnp.bfloat16), kv.astype(jnp.bfloat16)
    return fun(
        q,
        kv,
        layout,
        selected if mode == 'block' else None,
        None,
        Form(WINDOW if mode == 'window' else None),
        NUM,
    )

  return nx.jit(run)


def in_stream(data, mode, chunk, tiles, impl='gpu', seed=0):
  kv, table = streams.pool(data, seed, pages=8)
  q, layout, place = streams.stream(data, table, [chunk], 16, tiles)
  out = attend(mode, impl)(q, jnp.asarray(kv), layout, chosen(place, 16))
  return [streams.by_place(x, place) for x in out]


def in_rows(data, mode):
  q, kv, layout, place = streams.packed(data, [[0]], ROW)
  out = attend(mode, 'gpu')(q, kv, layout, chosen(place, len(q)))
  return [streams.by_place(x, place) for x in out]


@pytest.mark.parametrize(
    'mode',
    [
        pytest.param('block', marks=pytest.mark.slow),
        pytest.param('full', marks=pytest.mark.slow),
        pytest.param('window', marks=pytest.mark.slow),
    ],
)
def test_values(mode):
  data = streams.world('bfloat16', (LENGTH,))
  chunk = in_stream(data, mode, CHUNK, 2)
  expected = in_stream(data, mode, CHUNK, 2, 'reference')
  assert len(chunk[0]) == CHUNK[2]
  for ours, theirs in zip(chunk, expected):
    for key, row in theirs.items():
      samples.close(ours[key].astype(np.float32), row, 'bfloat16')


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['block', 'full', 'window'])
def test_bits(mode):
  """A chunk, one token of it on other pages, and a row give equal bits."""
  data = streams.world('bfloat16', (LENGTH,))
  chunk = in_stream(data, mode, CHUNK, 2)
  alone = in_stream(data, mode, DECODE, 1, seed=5)
  assert len(alone[0]) == 1
  for ours, one, rows in zip(chunk, alone, in_rows(data, mode)):
    for key, row in ours.items():
      samples.same_bits(row, rows[key])
    for key, row in one.items():
      samples.same_bits(row, ours[key])


@pytest.mark.parametrize(
    'mode',
    [
        pytest.param('block', marks=pytest.mark.slow),
        pytest.param('full', marks=pytest.mark.slow),
        pytest.param('window', marks=pytest.mark.slow),
    ],
)
def test_gradients(mode):
  """Of two sequences in a row; the reference has no rounding in between."""
  data = streams.world('bfloat16', (streams.PAGE + 3, streams.PAGE - 5))
  q, kv, layout, place = streams.packed(data, [[0, 1]], 3 * streams.PAGE)
  selected = chosen(place, len(q)) if mode == 'block' else None
  g = jnp.asarray(samples.normal(9, q.shape, 'bfloat16'))
  form = Form(WINDOW if mode == 'window' else None)
  wide = samples.EXACT['float32']
  out, lse = ops.xla.attend(q, kv, layout, selected, None, form, wide)
  rest = layout, selected, out, lse, g, form

  expected = backward.attend_rows_backward(q, kv, *rest, wide)
  ours = pallas_gpu_backward.attend_rows_backward(
      q.astype(jnp.bfloat16), kv.astype(jnp.bfloat16), *rest, NUM
  )
  for a, b in zip(ours, expected):
    assert a.dtype == jnp.bfloat16 and a.shape == b.shape
    samples.close(a.astype(np.float32), b, 'bfloat16')


def test_the_tiles_that_visit_a_page():
  """Two tiles a page: lists (page: tiles) by hand, in a window of a page."""
  data = streams.world('bfloat16', (2 * streams.PAGE,))
  q, kv, layout, _ = streams.packed(data, [[0]], 3 * streams.PAGE)
  q = jnp.tile(q, (1, 2, 1)).astype(jnp.bfloat16)  # 16 heads: tiles of 8
  tiles = pallas_gpu.Tiles.of(
      q, kv.astype(jnp.bfloat16), layout, None, Form(streams.PAGE)
  )
  begin, visitors, words = pallas_gpu_backward._Keys(tiles).visitors(3)
  assert words is None
  lists = [list(visitors[0, a:b]) for a, b in zip(begin[0], begin[0, 1:])]
  # Positions 16..23 see back to 1..8; the third page is padding, a sequence.
  assert lists == [[0, 1, 2, 3], [2, 3], [4, 5]]


def test_what_is_refused():
  data = streams.world('bfloat16', (LENGTH,))
  q, kv, layout, _ = streams.packed(data, [[0]], ROW)

  def attend(q, kv, sink=None, **form):
    return pallas_gpu.attend(q, kv, layout, None, sink, Form(**form), NUM)

  with pytest.raises(ValueError, match='float32 and .* needs bfloat16'):
    attend(q, kv)
  q, kv = q.astype(jnp.bfloat16), kv.astype(jnp.bfloat16)
  with nx.target('gpu'):
    with pytest.raises(ValueError, match=r'head width 8: .* \(64, 128\)'):
      attend(q, kv)
    with pytest.raises(ValueError, match=r'page size 16: .* \(64, 128\)'):
      attend(jnp.tile(q, (1, 1, 8)), jnp.tile(kv, (1, 1, 1, 8)))
  with pytest.raises(ValueError, match='24 query heads .* at most 16'):
    attend(jnp.tile(q, (1, 3, 1)), kv)
  with pytest.raises(ValueError, match=r'sink_N=\(8,\): .* gpu does not'):
    attend(q, kv, sink=jnp.zeros(8))
  with pytest.raises(ValueError, match='soft_cap=3.0: .* gpu does not'):
    attend(q, kv, soft_cap=3.0)
  with pytest.raises(ValueError, match='sink_page=True: .* gpu does not'):
    attend(q, kv, sink_page=True)
