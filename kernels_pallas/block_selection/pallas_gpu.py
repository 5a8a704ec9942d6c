"""Block selection for Hopper GPUs: the products of queries and mean keys.

They are those of the grouped matrix product, a group for each tile and KV head.
All else is additions and comparisons in XLA, under the rules of
`kernels_pallas.numerics`. As in `xla.py` there is a float32 score for every
token, KV head and page; the TPU kernel has none.
"""

from __future__ import annotations

import jax.numpy as jnp

from kernels_pallas import numerics as nx
from kernels_pallas.block_selection import xla
from kernels_pallas.grouped_matmul import pallas_gpu as grouped

page_means = xla.page_means


def select_pages(q_TNH, means_MKH, layout, page_size, topk, numerics):
  """See `ops.select_pages`.

  Raises:
    ValueError: unless the queries are bfloat16.
  """

  def product(q, means):
    tiles, heads, rows, width = q.shape
    q = jnp.pad(q, [(0, 0), (0, 0), (0, -rows % nx.ROW_TILE), (0, 0)])
    high = q.shape[2]
    group = jnp.arange(tiles * heads, dtype=jnp.int32)
    s = grouped.Grouped.backward_rows(
        q.reshape(-1, width),
        means.reshape(tiles * heads, -1, width),
        jnp.repeat(group, high // nx.ROW_TILE),
        numerics,
    )
    return s.reshape(tiles, heads, high, -1)[:, :, :rows]

  return xla.select_pages(
      q_TNH, means_MKH, layout, page_size, topk, numerics, product
  )
