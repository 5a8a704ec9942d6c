"""Block selection, the obvious way."""

import jax.numpy as jnp


def page_means(kv_MCKh, numerics):
  """See `ops.page_means`."""
  del numerics
  return kv_MCKh[..., : kv_MCKh.shape[-1] // 2].mean(1)


def select_pages(q_TNH, means_MKH, layout, page_size, topk, numerics):
  """See `ops.select_pages`."""
  del numerics
  heads, width = means_MKH.shape[1:]
  q = q_TNH.reshape(len(q_TNH), heads, -1, width).sum(2)
  means = means_MKH[layout.page_table_SW[layout.sequences_T]]
  s = jnp.einsum('tkh,twkh->tkw', q, means, precision='highest')
  past = jnp.arange(s.shape[-1]) < (layout.positions_T // page_size)[:, None]
  s = jnp.where(past[:, None], s, -jnp.inf)
  number = jnp.argsort(-s, -1, stable=True)[..., :topk]
  score = jnp.take_along_axis(s, number, -1)
  number = jnp.where(score > -jnp.inf, number, -1)
  pad = topk - number.shape[-1]
  return jnp.pad(number, [(0, 0), (0, 0), (0, pad)], constant_values=-1)
