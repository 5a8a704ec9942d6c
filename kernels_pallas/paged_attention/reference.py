"""Paged attention, the obvious way: one softmax over all visible keys."""

import jax
import jax.numpy as jnp


def attend(q_TNH, kv_MCKh, layout, selected_TKj, sink_N, form, numerics):
  """See `ops.paged_attention`. Tokens in no tile give zero."""
  page_size, heads, width = kv_MCKh.shape[1:]
  width //= 2
  group = q_TNH.shape[1] // heads
  table_TW = layout.page_table_SW[layout.sequences_T]
  kv = kv_MCKh[table_TW].reshape(len(q_TNH), -1, heads, 2 * width)
  number = jnp.arange(kv.shape[1]) // page_size
  own = layout.positions_T // page_size
  seen = jnp.arange(kv.shape[1]) <= layout.positions_T[:, None]
  if form.window is not None:
    near = jnp.arange(kv.shape[1]) > layout.positions_T[:, None] - form.window
    seen &= near | (number == 0) if form.sink_page else near
  seen = jnp.repeat(seen[:, None], heads, 1)
  if selected_TKj is not None:
    picked = (selected_TKj[..., None] == number).any(2)
    seen &= picked | (number == own[:, None])[:, None]
  if layout.tile_place_T is not None:
    seen &= (layout.tile_place_T < layout.tiles.size)[:, None, None]
  q = q_TNH.reshape(-1, heads, group, width)
  s = jnp.einsum('tkgh,tskh->tkgs', q, kv[..., :width], precision='highest')
  s = s * width**-0.5
  if form.soft_cap:
    s = form.soft_cap * jnp.tanh(s / form.soft_cap)
  s = jnp.where(seen[:, :, None], s, -jnp.inf)
  if sink_N is not None:  # a last key, without a value
    sink = jnp.broadcast_to(sink_N.reshape(heads, group, 1), (*s.shape[:3], 1))
    s = jnp.concatenate([s, sink], -1)
  p = jnp.where(seen.any(-1)[..., None, None], jax.nn.softmax(s, -1), 0.0)
  p = p[..., : kv.shape[1]]
  v = jnp.where(
      seen[:, :, None].any((1, 2))[..., None, None], kv[..., width:], 0
  )
  out = jnp.einsum('tkgs,tskh->tkgh', p, v, precision='highest')
  lse = jax.nn.logsumexp(s, -1).reshape(q_TNH.shape[:2])
  return numerics.cast(out.reshape(q_TNH.shape)), lse
