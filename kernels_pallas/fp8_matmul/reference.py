"""Dense product of e4m3 numbers, the obvious way."""

import jax.numpy as jnp


def matmul(x, x_scale, w, w_scale, numerics):
  """Returns float32 [T, F], the product of the dequantised factors."""
  del numerics
  x = x.astype('float32') * x_scale
  for axis in (0, 1):
    repeats = w.shape[axis] // w_scale.shape[axis]
    w_scale = jnp.repeat(w_scale, repeats, axis)
  w = w.astype('float32') * w_scale
  return jnp.einsum('td,df->tf', x, w, precision='highest')
