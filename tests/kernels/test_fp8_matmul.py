"""Product of e4m3 numbers: hand-computed, against the reference, pure."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.fp8_matmul import ops
from tests.kernels import samples

DTYPES = samples.DTYPES
IMPLS = ('xla', 'pallas')


def multiply(numerics, impl='xla'):
  return lambda x, w: ops.fp8_matmul(x, w, numerics=numerics, impl=impl)


def dequantized(x, w):
  """Both factors as they are multiplied, in float64."""
  q, scale = ops.quantize_rows(x)
  w = ops.dequantize_blocks(*ops.quantize_blocks(w))
  x = np.asarray(q).astype(np.float64) * np.asarray(scale)
  return x, np.asarray(w, np.float64)


def test_quantize_rows_by_hand():
  x = jnp.asarray(
      [
          [448.0, -1.0, 17.0, 0.0],
          [2.0, 1.0, -0.5, 0.25],
          [0.0, 0.0, -0.0, 0.0],
          [1e-37, 0.0, -1e-37, 0.0],
      ]
  )
  q, scale = nx.jit(ops.quantize_rows)(x)
  assert q.dtype == jnp.float8_e4m3fn
  np.testing.assert_array_equal(
      q.astype('float32'),
      # 17 lies between 16 and 18 and goes to the even one.
      [[448, -1, 16, 0], [448, 224, -112, 56], [0] * 4, [0] * 4],
  )
  np.testing.assert_array_equal(scale, [[1], [2 / np.float32(448)], [1], [1]])


def test_quantize_blocks_by_hand():
  w = np.zeros((256, 130 - 2), np.float32)
  w[0, 0], w[127, 127] = 896, 2
  w[128, 5] = -448
  q, scale = nx.jit(ops.quantize_blocks)(w)
  np.testing.assert_array_equal(scale, [[2], [1]])
  assert q[0, 0] == 448 and q[127, 127] == 1 and q[128, 5] == -448
  np.testing.assert_array_equal(ops.dequantize_blocks(q, scale), w)
  q, scale = ops.quantize_blocks(jnp.asarray([[448.0, 4], [2, 1], [3, 0]]))
  assert q.shape == (3, 2) and scale.shape == (1, 1)


@pytest.mark.parametrize('dtype', DTYPES)
def test_rounding_is_that_of_e4m3(dtype):
  x = samples.normal(0, (64, 300), dtype)
  q, scale = (np.asarray(a) for a in nx.jit(ops.quantize_rows)(x))
  np.testing.assert_array_equal(
      q.view(np.uint8),
      (x.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn).view('u1'),
  )
  np.testing.assert_allclose(scale[:, 0], np.abs(x).max(1) / 448, rtol=1e-6)
  # Half a unit in the last place of three bits, or of the smallest exponent.
  bound = np.maximum(np.abs(x) / 16, scale * 2.0**-10)
  assert (np.abs(q.astype(np.float32) * scale - x) <= bound * 1.001).all()


@pytest.mark.parametrize('impl', ['reference', *IMPLS])
def test_by_hand(impl):
  x = jnp.asarray([[448.0, 2, 0], [1, 0.5, 0], [0, 0, 0]])
  w = jnp.asarray([[448.0, 1], [32, 0], [5, 5]])
  y = multiply(samples.FREE, impl)(x, w)
  assert y.dtype == jnp.float32
  np.testing.assert_allclose(
      y, [[448 * 448 + 64, 448], [448 + 16, 1], [0, 0]], rtol=1e-6
  )


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(64, 8, 16), (192, 384, 256), (64, 128, 1)])
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
  xq, wq = dequantized(x, w)
  samples.close(y, xq @ wq)
  samples.close(grads[0], g @ wq.T)
  samples.close(grads[1], xq.T @ g)
  samples.close(y, x @ w, scale=1e4 * np.sqrt(d))  # a fifth of a product


def test_the_sum_of_blocks_by_hand():
  """Blocks of D are scaled first and added in ascending order."""
  x = np.zeros((64, 384), np.float32)
  x[0, [0, 128, 256]] = 448, 448, 448
  w = np.zeros((384, 8), np.float32)
  w[[0, 128, 256], 0] = 448 * 2.0**25, 448, -448 * 2.0**25
  for impl in IMPLS:
    y = multiply(samples.EXACT['float32'], impl)(x, w)
    # 2^25 + 1 - 2^25 in units of 448², where float32 loses the 1.
    assert y[0, 0] == 0
    assert not np.any(y[1:])
  assert multiply(samples.EXACT['float32'])(x, np.roll(w, 128, 0))[0, 0] != 0


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_a_row_is_pure(dtype, impl):
  product = multiply(samples.EXACT[dtype], impl)
  fun = nx.jit(product)
  w = samples.normal(0, (256, 40), dtype)
  x = samples.normal(1, (192, 256), dtype)
  y = np.asarray(fun(x, w))
  order = np.random.default_rng(2).permutation(192)
  samples.same_bits(fun(x[order], w), y[order])
  few = samples.nan_but((64, 256), {7: x[130], 63: x[1]})
  few = np.asarray(fun(few, w))
  samples.same_bits(few[[7, 63]], y[[130, 1]])

  def loss(x, w):
    out = product(x, w)
    return jnp.square(out).sum(), out

  gradient = nx.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  samples.same_bits(gradient(x, w)[0][1], y)


def test_gradients_keep_their_dtype():
  x, w = jnp.ones((64, 4), jnp.bfloat16), jnp.ones((4, 4))
  run = lambda x, w: multiply(samples.FREE)(x, w).sum()
  dx, dw = jax.grad(run, (0, 1))(x, w)
  assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32


@pytest.mark.parametrize(
    ('call', 'match'),
    [
        (
            lambda f: f(jnp.zeros((64, 3)), jnp.zeros((4, 5))),
            r'x_TD \(64, 3\) and w_DF \(4, 5\)',
        ),
        (
            lambda f: f(jnp.zeros((63, 4)), jnp.zeros((4, 5))),
            r'x_TD \(63, 4\): 63 rows, a multiple of 64',
        ),
        (
            lambda f: f(jnp.zeros((64, 130)), jnp.zeros((130, 5))),
            r'w_DF \(130, 5\): expected \[D, F\], each at most 128',
        ),
        (
            lambda f: ops.quantize_blocks(jnp.zeros((4, 200))),
            r'w_DF \(4, 200\)',
        ),
        (lambda f: ops.quantize_blocks(jnp.zeros(4)), r'w_DF \(4,\)'),
        (lambda f: ops.quantize_rows(jnp.zeros(4)), r'x_TD \(4,\)'),
        (
            lambda f: multiply(samples.FREE, 'cuda')(
                jnp.zeros((1, 1)), jnp.zeros((1, 1))
            ),
            "impl='cuda' of fp8_matmul: allowed",
        ),
    ],
)
def test_bad_input(call, match):
  with pytest.raises(ValueError, match=match):
    call(multiply(samples.EXACT['float32']))
