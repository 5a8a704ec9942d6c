"""Product of e4m3 numbers: hand-computed, against the reference, pure."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.fp8_matmul import ops
from kernels_pallas.grouped_matmul import ops as grouped
from tests.kernels import samples

DTYPES = samples.DTYPES
IMPLS = ('xla', 'pallas')


def multiply(numerics, impl='xla'):
  return lambda x, w: ops.fp8_matmul(x, w, numerics=numerics, impl=impl)


def dequantized(x, w):
  """Both factors as they are multiplied, in float64."""
  q, scale = ops.quantize_rows(jnp.asarray(x))
  w = ops.dequantize_blocks(*ops.quantize_blocks(jnp.asarray(w)))
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
  np.testing.assert_array_equal(
      q,
      # 17 lies between 16 and 18 and goes to the even one.
      [[448, -1, 16, 0], [256, 128, -64, 32], [0] * 4, [0] * 4],
  )
  np.testing.assert_array_equal(scale, [[1], [2.0**-7], [1], [1]])
  # The first power of two that leaves no number above 448.
  above = np.nextafter(np.float32(448), np.float32(449))
  q, scale = nx.jit(ops.quantize_rows)(jnp.asarray([[above], [449.0], [3.5]]))
  np.testing.assert_array_equal(scale, [[2], [2], [2.0**-7]])
  np.testing.assert_array_equal(q, [[224], [224], [448]])
  q, scale = ops.quantize_rows(jnp.asarray([[jnp.inf, 1], [jnp.nan, 1]]))
  assert np.isnan(np.asarray(q * scale)[:, 0]).all()


def test_elsewhere_the_numbers_are_of_eight_bits():
  x = jax.ShapeDtypeStruct((2, 256), jnp.bfloat16)
  with nx.target('tpu'):
    for quantize in (ops.quantize_rows, ops.quantize_blocks):
      q, scale = jax.eval_shape(lambda x, f=quantize: f(x), x)
      assert q.dtype == ops.E4M3 and scale.dtype == jnp.float32


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
  both = ops.quantize_blocks(jnp.asarray(np.stack([w, 2 * w])))
  np.testing.assert_array_equal(both[1], [[[2], [1]], [[4], [2]]])
  np.testing.assert_array_equal(ops.dequantize_blocks(*both)[1], 2 * w)


@pytest.mark.parametrize('dtype', DTYPES)
def test_rounding_is_that_of_e4m3(dtype):
  # From the largest numbers of a row to those that are rounded to zero.
  x = samples.normal(0, (64, 300)) * 2.0 ** np.arange(-24, 6)[None].repeat(10)
  x = x.astype(samples.ROUNDED[dtype]).astype(np.float32)
  q, scale = (np.asarray(a) for a in nx.jit(ops.quantize_rows)(x))
  e4m3 = (x / scale).astype(ml_dtypes.float8_e4m3fn)
  samples.same_bits(q, e4m3.astype(np.float32))
  np.testing.assert_array_equal(np.log2(scale) % 1, 0)
  largest = np.abs(x).max(1) / scale[:, 0]
  assert (largest <= 448).all() and (largest > 224).all()
  # Half a unit in the last place of three bits, or of the smallest exponent.
  bound = np.maximum(np.abs(x) / 16, scale * 2.0**-10)
  assert (np.abs(q * scale - x) <= bound).all()
  # What is scaled again is a number of bfloat16.
  half = (q * scale).astype(ml_dtypes.bfloat16)
  samples.same_bits(half.astype(np.float32), q * scale)


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
@pytest.mark.parametrize(
    ('dtype', 'shape'),
    [('bfloat16', (192, 384, 256)), ('float32', (64, 8, 16)),
     ('bfloat16', (64, 128, 1))],
)  # fmt: skip
def test_values_and_gradients(dtype, shape, impl):
  t, d, f = shape
  x, w = samples.normal(0, (t, d), dtype), samples.normal(1, (d, f), dtype)
  g = samples.normal(2, (t, f), dtype)
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
def test_a_row_is_pure(impl):
  dtype = 'bfloat16'
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


TOKENS, EXPERTS = 70, 5


def choices():
  """Two experts a token; 0 and 3 have none."""
  rng = np.random.default_rng(0)
  rows = [rng.permutation([1, 2, 4])[:2] for _ in range(TOKENS)]
  return jnp.asarray(rows, jnp.int32)


def mixture(dtype, impl):
  """(x, w, experts) -> [T, topk, F]; padding rows are left out."""

  def run(x, w, experts):
    plan = grouped.plan(experts, EXPERTS)
    y = ops.fp8_grouped_matmul(
        grouped.dispatch(x, plan),
        w,
        plan,
        numerics=samples.EXACT[dtype],
        impl=impl,
    )
    return grouped.slots(y, plan)

  return run


@pytest.mark.parametrize('impl', ['reference', *IMPLS])
@pytest.mark.parametrize(('dtype', 'd'), [('bfloat16', 256), ('float32', 24)])
def test_grouped_values_and_gradients(dtype, d, impl):
  x = jnp.asarray(samples.normal(0, (TOKENS, d), dtype))
  w = jnp.asarray(samples.normal(1, (EXPERTS, d, 40), dtype))
  g, experts = samples.normal(2, (TOKENS, 2, 40), dtype), choices()
  own = np.asarray(experts)
  fun = lambda x, w: mixture(dtype, impl)(x, w, experts)
  y, (dx, dw) = samples.gradients(fun, (x, w), g)
  both = [dequantized(x, w[e]) for e in range(EXPERTS)]
  xq, wq = both[0][0], np.stack([b[1] for b in both])
  samples.close(y, np.einsum('td,tkdf->tkf', xq, wq[own]))
  samples.close(dx, np.einsum('tkf,tkdf->td', g, wq[own]))
  for e in range(EXPERTS):
    samples.close(dw[e], np.einsum('td,tkf,tk->df', xq, g, own == e))


@pytest.mark.parametrize('impl', IMPLS)
def test_a_row_of_the_grouped_product_is_pure(impl):
  dtype = 'bfloat16'
  product = mixture(dtype, impl)
  fun = nx.jit(product)
  x = samples.normal(0, (TOKENS, 256), dtype)
  w = samples.normal(1, (EXPERTS, 256, 40), dtype)
  experts = choices()
  y = np.asarray(fun(x, w, experts))
  order = np.random.default_rng(3).permutation(TOKENS)
  samples.same_bits(fun(x[order], w, experts[order]), y[order])
  # Padding may hold anything and share the tile.
  few = samples.nan_but((9, 256), {4: x[11]})
  other = np.tile(experts[11], (9, 1))
  samples.same_bits(np.asarray(fun(few, w, other))[4], y[11])

  def loss(x, w):
    out = product(x, w, experts)
    return jnp.square(out).sum(), out

  gradient = nx.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  samples.same_bits(gradient(x, w)[0][1], y)


def test_gradients_keep_their_dtype():
  x, w = jnp.ones((64, 4), jnp.bfloat16), jnp.ones((4, 4))
  run = lambda x, w: multiply(samples.FREE)(x, w).sum()
  dx, dw = jax.eval_shape(jax.grad(run, (0, 1)), x, w)
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
            r'w_DF \(130, 5\): expected \[..., D, F\], each at most 128',
        ),
        (
            lambda f: ops.quantize_blocks(jnp.zeros((4, 200))),
            r'w_DF \(4, 200\)',
        ),
        (lambda f: ops.quantize_blocks(jnp.zeros(4)), r'w_DF \(4,\)'),
        (
            lambda f: mixture('float32', 'xla')(
                jnp.zeros((3, 4)),
                jnp.zeros((4, 5)),
                jnp.zeros((3, 2), jnp.int32),
            ),
            r'w_EDF \(4, 5\): expected \[E, D, F\]',
        ),
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
