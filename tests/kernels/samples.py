"""What the tests of all kernels share: random arrays, bits, tolerances."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from agentic_rl.numerics import unequal_bits
from kernels_pallas import numerics as nx

DTYPES = ('float32', 'bfloat16')
ROUNDED = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}
EXACT = {dtype: nx.Numerics(dtype) for dtype in DTYPES}
FREE = nx.Numerics(exact=False)

# Of results of order one: bfloat16 keeps eight bits of each.
TOLERANCE = {'float32': 2e-5, 'bfloat16': 3e-2}


def normal(seed, shape, dtype='float32', scale=1.0):
  """Standard normal values that `dtype` can hold, as a NumPy array."""
  x = np.random.default_rng(seed).normal(size=shape) * scale
  return x.astype(ROUNDED[dtype]).astype(EXACT[dtype].storage)


def whole(seed, *shape):
  """Small integers in bfloat16; sums of their products are exact."""
  x = np.random.default_rng(seed).integers(-8, 9, shape)
  return jnp.asarray(x, jnp.bfloat16)


def nan_but(shape, rows, dtype=np.float32, fill=np.nan):
  """An array of NaN with some rows set, {index: row}."""
  out = np.full(shape, fill, dtype)
  for i, row in rows.items():
    out[i] = row
  return out


def close(actual, expected, dtype='float32', scale=None):
  """Asserts equality up to the rounding of `dtype`."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  if scale is None:
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
  assert np.isfinite(expected).all()
  np.testing.assert_allclose(
      actual, expected, rtol=0, atol=TOLERANCE[dtype] * scale
  )


def same_bits(actual, expected):
  actual, expected = np.asarray(actual), np.asarray(expected)
  if actual.dtype.kind == 'i':
    np.testing.assert_array_equal(actual, expected)
  else:
    assert unequal_bits(actual, expected) == 0


def gradients(fun, args, cotangents):
  """Returns the value of fun(*args) and its gradients."""

  def run(args, cotangents):
    value, pull = jax.vjp(fun, *args)
    return value, pull(cotangents)

  return nx.jit(run)(args, cotangents)


def biggest(jaxpr):
  """Sizes of all arrays of a program, also of its loops and branches."""
  for eqn in jaxpr.eqns:
    for v in eqn.outvars:
      yield v.aval.size
    for value in eqn.params.values():
      for part in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(part, 'jaxpr', part)
        if hasattr(inner, 'eqns'):
          yield from biggest(inner)
