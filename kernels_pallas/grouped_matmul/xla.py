"""Grouped matrix product as a loop over row tiles.

Tiles without a slot, whose expert is E, are zeros and meet the last expert.
"""

import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx


def _pick(w, e):
  return w[jnp.minimum(e, w.shape[0] - 1)]


class Grouped:
  """Forward, row gradient and weight gradient, one tile a step."""

  @staticmethod
  def forward(x, w, expert, numerics):
    """Returns float32 [R, F]."""
    tiles = x.reshape(expert.shape[0], -1, x.shape[1])

    def tile(args):
      rows, e = args
      return numerics.dot(rows, _pick(w, e), (((1,), (0,)), ((), ())))

    return lax.map(tile, (tiles, expert)).reshape(x.shape[0], w.shape[2])

  @staticmethod
  def backward_rows(g, w, expert, numerics):
    """Returns float32 [R, D], g Wᵀ."""
    tiles = g.reshape(expert.shape[0], -1, g.shape[1])

    def tile(args):
      rows, e = args
      return numerics.dot(rows, _pick(w, e), (((1,), (1,)), ((), ())))

    return lax.map(tile, (tiles, expert)).reshape(g.shape[0], w.shape[1])

  @staticmethod
  def backward_weights(x, g, expert, num_experts, numerics):
    """Returns float32 [E, D, F], Σ over the expert's tiles of xᵀ g."""
    n = expert.shape[0]
    x_tiles = x.reshape(n, -1, x.shape[1])
    g_tiles = g.reshape(n, -1, g.shape[1])

    def tile(i, dw):
      part = numerics.dot(x_tiles[i], g_tiles[i], (((0,), (0,)), ((), ())))
      return dw.at[expert[i]].add(part, mode='drop')

    zero = jnp.zeros((num_experts, x.shape[1], g.shape[1]), nx.F32)
    return lax.fori_loop(0, n, tile, zero)
