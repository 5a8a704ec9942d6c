"""Dense product: hand-computed, against the reference, pure in its rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.numerics import unequal_bits
from kernels_pallas import numerics as nx
from kernels_pallas.matmul import ops
from tests.kernels import samples

DTYPES = samples.DTYPES


def multiply(numerics, impl='xla'):
  return lambda x, w: ops.matmul(x, w, numerics=numerics, impl=impl)


def test_reference_by_hand():
  x = jnp.asarray([[1.0, 2], [3, 4], [0, -1]])
  w = jnp.asarray([[5.0, 6], [7, 8]])
  y = multiply(samples.FREE, 'reference')(x, w)
  np.testing.assert_array_equal(y, [[19, 22], [43, 50], [-7, -8]])
  assert y.dtype == jnp.float32


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(64, 8, 16), (192, 40, 24), (64, 1, 1)])
def test_values_and_gradients(dtype, shape):
  t, d, f = shape
  x, w = samples.normal(0, (t, d), dtype), samples.normal(1, (d, f), dtype)
  g = samples.normal(2, (t, f))
  num = samples.EXACT[dtype]
  y, grads = samples.gradients(multiply(num), (x, w), g)
  y_ref, grads_ref = samples.gradients(multiply(num, 'reference'), (x, w), g)
  samples.close(y, y_ref)
  for a, b in zip(grads, grads_ref):
    samples.close(a, b)
  free, free_grads = samples.gradients(multiply(samples.FREE), (x, w), g)
  samples.close(free, y_ref)
  samples.close(free_grads[1], grads_ref[1])


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_row_is_pure(dtype):
  fun = nx.jit(multiply(samples.EXACT[dtype]))
  w = samples.normal(0, (96, 40), dtype)
  x = samples.normal(1, (192, 96), dtype)
  y = np.asarray(fun(x, w))
  order = np.random.default_rng(2).permutation(192)
  samples.same_bits(fun(x[order], w), y[order])
  few = samples.nan_but((64, 96), {7: x[130], 63: x[1]})
  few = np.asarray(fun(few, w))
  samples.same_bits(few[[7, 63]], y[[130, 1]])


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

  nx.compiler_options.cache_clear()
  monkeypatch.setattr(nx.jax, 'jit', refuse)
  try:
    with pytest.raises(RuntimeError, match='rejects the compiler option'):
      nx.compiler_options()
  finally:
    nx.compiler_options.cache_clear()


def test_tree_sum_of_any_length():
  num = samples.EXACT['float32']
  rows = [np.arange(2.0 * n).reshape(2, n) for n in (1, 2, 3, 7, 8, 33)]
  sums = nx.jit(lambda rows: [num.tree_sum(x) for x in rows])(rows)
  for x, total in zip(rows, sums):
    np.testing.assert_array_equal(total, x.sum(-1))
