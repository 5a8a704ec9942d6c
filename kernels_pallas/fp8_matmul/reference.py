"""Products of e4m3 numbers, the obvious way."""

import jax.numpy as jnp

from kernels_pallas.grouped_matmul import reference


def spread(scale, shape):
  """Repeats the scales of blocks over their numbers, to [..., D, F]."""
  for axis in (-2, -1):
    scale = jnp.repeat(scale, shape[axis] // scale.shape[axis], axis)
  return scale


def matmul(x, x_scale, w, w_scale, numerics):
  """Returns float32 [T, F], the product of the dequantised factors."""
  del numerics
  x = x.astype('float32') * x_scale
  w = w.astype('float32') * spread(w_scale, w.shape)
  return jnp.einsum('td,df->tf', x, w, precision='highest')


def grouped(x, x_scale, w, w_scale, expert, numerics):
  """Returns float32 [R, F], the product of the dequantised factors."""
  x = x.astype('float32') * x_scale
  w = w.astype('float32') * spread(w_scale, w.shape)
  return reference.Grouped.forward(x, w, expert, numerics)
