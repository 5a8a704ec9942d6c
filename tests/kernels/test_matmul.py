"""Dense product: hand-computed, against the reference, pure in its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.numerics import unequal_bits
from kernels_pallas import numerics as nx
from kernels_pallas.grouped_matmul import ops as grouped
from kernels_pallas.matmul import ops
from kernels_pallas.matmul import pallas_tpu
from tests.kernels import samples

DTYPES = samples.DTYPES
IMPLS = ('xla', 'pallas')


def multiply(numerics, impl='xla'):
  return lambda x, w: ops.matmul(x, w, numerics=numerics, impl=impl)


@pytest.mark.parametrize('impl', ['reference', *IMPLS])
def test_by_hand(impl):
  x = jnp.asarray([[1.0, 2], [3, 4], [0, -1]])
  w = jnp.asarray([[5.0, 6], [7, 8]])
  y = multiply(samples.FREE, impl)(x, w)
  np.testing.assert_array_equal(y, [[19, 22], [43, 50], [-7, -8]])
  assert y.dtype == jnp.float32


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(64, 8, 16), (192, 40, 24), (64, 1, 1)])
def test_values_and_gradients(dtype, shape, impl):
  t, d, f = shape
  x, w = samples.normal(0, (t, d), dtype), samples.normal(1, (d, f), dtype)
  g = samples.normal(2, (t, f))
  num = samples.EXACT[dtype]
  y, grads = samples.gradients(multiply(num, impl), (x, w), g)
  y_ref, grads_ref = samples.gradients(multiply(num, 'reference'), (x, w), g)
  samples.close(y, y_ref)
  for a, b in zip(grads, grads_ref):
    samples.close(a, b)
  free = multiply(samples.FREE, impl)
  free, free_grads = samples.gradients(free, (x, w), g)
  samples.close(free, y_ref)
  samples.close(free_grads[1], grads_ref[1])


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_a_row_is_pure(dtype, impl):
  product = multiply(samples.EXACT[dtype], impl)
  fun = nx.jit(product)
  w = samples.normal(0, (96, 40), dtype)
  x = samples.normal(1, (192, 96), dtype)
  y = np.asarray(fun(x, w))
  order = np.random.default_rng(2).permutation(192)
  samples.same_bits(fun(x[order], w), y[order])
  few = samples.nan_but((64, 96), {7: x[130], 63: x[1]})
  few = np.asarray(fun(few, w))
  samples.same_bits(few[[7, 63]], y[[130, 1]])

  def loss(x, w):
    out = product(x, w)
    return jnp.square(out).sum(), out

  gradient = nx.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  samples.same_bits(gradient(x, w)[0][1], y)


@pytest.mark.parametrize('height', [nx.ROW_TILE, grouped.GROUP_TILE])
def test_all_places_of_a_tile_are_alike(height):
  """The processor's library of products decides it."""
  num = samples.EXACT['float32']
  for depth, width in [(8, 1000), (96, 40), (128, 128), (512, 64), (1000, 256)]:
    w = samples.normal(0, (depth, width))
    x = np.tile(samples.normal(1, (depth,)), (height, 1))
    for turned in (False, True):
      fun = nx.jit(
          lambda x, w, d=int(turned): num.dot(x, w, (((1,), (d,)), ((), ())))
      )
      y = np.asarray(fun(x, w.T if turned else w))
      samples.same_bits(y, np.broadcast_to(y[0], y.shape))


def test_blocks_of_columns_and_of_depth(monkeypatch):
  # Blocks of [128, 128]: three in depth, two in width, the last of them short.
  monkeypatch.setattr(pallas_tpu, 'BLOCK_BYTES', 128 * 128 * 4)
  assert pallas_tpu.depth_tile(384, 4) == 128
  num = samples.EXACT['float32']
  w = np.random.default_rng(0).integers(-4, 5, (384, 200)).astype(np.float32)
  x = np.random.default_rng(1).integers(-4, 5, (192, 384)).astype(np.float32)
  fun = nx.jit(multiply(num, 'pallas'))
  np.testing.assert_array_equal(fun(x, w), x @ w)  # of small integers: exact
  w, x = samples.normal(2, w.shape), samples.normal(3, x.shape)
  y = np.asarray(fun(x, w))
  samples.close(y, multiply(num, 'reference')(x, w))
  few = samples.nan_but((64, 384), {5: x[140]})
  samples.same_bits(np.asarray(fun(few, w))[5], y[140])


def test_block_sizes():
  assert pallas_tpu.split(1024, 1024) == 1024
  assert pallas_tpu.split(1536, 1024) == 768
  assert pallas_tpu.split(2816, 1024) == 1024  # 939, to whole lanes
  assert pallas_tpu.split(100, 1024) == 100
  assert pallas_tpu.column_block(3072, 1024, 2) == 1024
  assert pallas_tpu.column_block(1024, 16384, 2) == 256
  assert pallas_tpu.depth_tile(32768, 2) == 32768
  assert pallas_tpu.depth_tile(3 * 16384, 2) == 8192
  assert pallas_tpu.row_tile(2048, 1024, 2) == nx.ROW_TILE
  with nx.target('tpu'):
    heights = [
        pallas_tpu.row_tile(t, 1024, 2) for t in (3, 64, 128, 576, 2048, 2112)
    ]
    assert pallas_tpu.row_tile(2048, 16384, 2) == 128
  assert heights == [3, 64, 128, 128, 512, 256]


@pytest.mark.parametrize(
    ('call', 'match'),
    [
        (
            lambda: pallas_tpu.column_block(128, 65536, 2),
            'depth 65536 of a product of 2-byte weights: at most 32768',
        ),
        (
            lambda: pallas_tpu.depth_tile(40001, 2),
            'D=40001 of x_TD: above 32768 a multiple of 128',
        ),
        (
            lambda: multiply(samples.FREE, 'pallas')(
                jnp.zeros((64, 4)), jnp.zeros((4, 4), jnp.bfloat16)
            ),
            "x_TD and w_DF float32 and bfloat16: impl='pallas' needs one dtype",
        ),
    ],
)
def test_what_the_blocks_do_not_take(call, match):
  with pytest.raises(ValueError, match=match):
    call()


def test_free_tiles_are_not_pure():
  fun = nx.jit(multiply(samples.FREE), exact=False)
  unequal = 0
  for d, f in ((128, 384), (512, 256)):
    w, x = samples.normal(0, (d, f)), samples.normal(1, (64, d))
    y = np.asarray(fun(x, w))
    for n in (1, 8, 40):
      unequal += unequal_bits(np.asarray(fun(x[:n], w)), y[:n])
  assert unequal


@pytest.mark.parametrize(
    ('x', 'w', 'match'),
    [
        ((64, 3), (4, 5), r'x_TD \(64, 3\) and w_DF \(4, 5\)'),
        ((64,), (4, 5), r'x_TD \(64,\)'),
        ((63, 4), (4, 5), r'x_TD \(63, 4\): 63 rows, a multiple of 64'),
    ],
)
def test_bad_shapes(x, w, match):
  with pytest.raises(ValueError, match=match):
    multiply(samples.EXACT['float32'])(jnp.zeros(x), jnp.zeros(w))


def test_unknown_implementation():
  with pytest.raises(ValueError, match="impl='cuda' of matmul: allowed"):
    multiply(samples.FREE, 'cuda')(jnp.zeros((1, 1)), jnp.zeros((1, 1)))


def test_unknown_dtype():
  with pytest.raises(ValueError, match="dtype='float16': allowed are"):
    nx.Numerics('float16')


def test_rejected_compiler_option(monkeypatch):
  def refuse(*args, **kwargs):
    raise RuntimeError('no such option')

  nx._cpu_options.cache_clear()
  monkeypatch.setattr(nx.jax, 'jit', refuse)
  try:
    with pytest.raises(RuntimeError, match='rejects one of the compiler opt'):
      nx.compiler_options()
  finally:
    nx._cpu_options.cache_clear()


def test_tree_sum_of_any_length():
  num = samples.EXACT['float32']
  rows = [np.arange(2.0 * n).reshape(2, n) for n in (1, 2, 3, 7, 8, 33)]
  sums = nx.jit(lambda rows: [num.tree_sum(x) for x in rows])(rows)
  for x, total in zip(rows, sums):
    np.testing.assert_array_equal(total, x.sum(-1))
