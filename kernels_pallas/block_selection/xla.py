"""Block selection in plain XLA, on the query tiles of paged attention.

It holds a float32 score for every token, KV head and page; the TPU kernel does
not.
"""

import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import layout as tiles_lib

_QUERY_BY_MEAN = (((3,), (3,)), ((0, 1), (0, 1)))


def page_means(kv_MCKh, numerics):
  """See `ops.page_means`."""
  width = kv_MCKh.shape[-1] // 2
  keys = kv_MCKh[..., :width].astype(nx.F32).transpose(0, 2, 3, 1)
  return numerics.keep(numerics.tree_sum(keys) * (1 / kv_MCKh.shape[1]))


def select_pages(
    q_TNH, means_MKH, layout, page_size, topk, numerics, product=None
):
  """See `ops.select_pages`.

  Args:
    q_TNH: queries.
    means_MKH: mean keys.
    layout: of the stream.
    page_size: C.
    topk: pages of a token and KV head.
    numerics: rounding and summation rules.
    product: (q [tiles, K, R, H], means [tiles, K, W, H]) -> float32
      [tiles, K, R, W]; that of XLA if None.
  """
  if product is None:
    product = lambda q, means: numerics.dot(q, means, _QUERY_BY_MEAN)
  heads, width = means_MKH.shape[1:]
  group = q_TNH.shape[1] // heads
  positions, table, _ = tiles_lib.tile_facts(layout, page_size)
  q = tiles_lib.to_tiles(lax.stop_gradient(q_TNH), layout)
  q = q.reshape(-1, tiles_lib.QUERY_TILE, heads, group, width).transpose(
      0, 2, 1, 3, 4
  )
  q = q.reshape(-1, heads, tiles_lib.QUERY_TILE * group, width)
  means = lax.stop_gradient(means_MKH)[table].transpose(0, 2, 1, 3)
  s = numerics.keep(product(q, means.astype(q.dtype)))
  s = s.reshape(*s.shape[:2], tiles_lib.QUERY_TILE, group, -1).swapaxes(-1, -2)
  s = numerics.tree_sum(s)  # [tiles, K, tile, W]
  pages = table.shape[1]
  past = jnp.arange(pages) < (positions // page_size)[:, None, :, None]
  s = jnp.where(past, s, -jnp.inf)
  count = min(topk, pages)
  best, number = lax.top_k(s, count)
  number = jnp.where(best > -jnp.inf, number, -1).astype(jnp.int32)
  number = jnp.pad(
      number, [(0, 0)] * 3 + [(0, topk - count)], constant_values=-1
  )
  return tiles_lib.from_tiles(number.transpose(0, 2, 1, 3), layout)
