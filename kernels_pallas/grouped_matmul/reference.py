"""Grouped matrix product, the obvious way: one matrix per tile, gathered."""

import jax
import jax.numpy as jnp


class Grouped:
  """Forward, row gradient and weight gradient by einsum."""

  @staticmethod
  def forward(x, w, expert, numerics):
    """Returns float32 [R, F]."""
    del numerics
    tiles = x.reshape(expert.shape[0], -1, x.shape[1])
    matrices = w.at[expert].get(mode='fill', fill_value=0)
    y = jnp.einsum('trd,tdf->trf', tiles, matrices, precision='highest')
    return y.reshape(x.shape[0], -1)

  @staticmethod
  def backward_rows(g, w, expert, numerics):
    """Returns float32 [R, D], g Wᵀ."""
    return Grouped.forward(g, w.swapaxes(1, 2), expert, numerics)

  @staticmethod
  def backward_weights(x, g, expert, num_experts, numerics):
    """Returns float32 [E, D, F]."""
    del numerics
    n = expert.shape[0]
    x, g = x.reshape(n, -1, x.shape[1]), g.reshape(n, -1, g.shape[1])
    parts = jnp.einsum('trd,trf->tdf', x, g, precision='highest')
    return jax.ops.segment_sum(parts, expert, num_experts)
