"""Log-prob head in plain XLA: row tiles x vocabulary tiles."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx

VOCAB_TILE = 512
BACKWARD_ROWS = 256

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def _tiles(w_DV):
  size = min(VOCAB_TILE, w_DV.shape[1])
  return [(lo, w_DV[:, lo : lo + size]) for lo in range(0, w_DV.shape[1], size)]


def _logits(rows, w, temperature, numerics):
  z = numerics.keep(numerics.dot(rows, w, _ROWS_BY_COLUMNS))
  return numerics.keep(z * (1 / temperature))


def logits(x_TD, w_DV, temperature, numerics):
  """Returns float32 [T, V], for sampling only."""
  parts = []
  for _, w in _tiles(w_DV):
    rows = x_TD.reshape(-1, nx.ROW_TILE, x_TD.shape[1])
    z = lax.map(lambda r, w=w: _logits(r, w, temperature, numerics), rows)
    parts.append(z.reshape(x_TD.shape[0], -1))
  return jnp.concatenate(parts, -1)


def inside(columns_V, support_Tk):
  """True [T, V] where a column is in the row's support (see `ops.logprobs`)."""
  hit = (support_Tk[:, :, None] == columns_V).any(1)
  return hit | (support_Tk < 0).all(-1, keepdims=True)


def logprobs(x_TD, w_DV, targets_T, temperature, numerics, support_Tk=None):
  """See `ops.logprobs`."""
  keep, tree_sum = numerics.keep, numerics.tree_sum

  def tile(args):
    rows, targets, *support = args
    m = jnp.full(rows.shape[:1], -1e30)
    l = u = jnp.zeros(rows.shape[:1])
    chosen = jnp.full(rows.shape[:1], -jnp.inf)
    for lo, w in _tiles(w_DV):
      z = _logits(rows, w, temperature, numerics)
      columns = lo + jnp.arange(w.shape[1])
      hit = targets[:, None] == columns
      if support:
        member = inside(columns, support[0])
        z = jnp.where(member, z, -jnp.inf)
      chosen = jnp.maximum(chosen, jnp.where(hit, z, -jnp.inf).max(-1))
      m_new = jnp.maximum(m, z.max(-1))
      a = keep(jnp.exp(m - m_new))
      p = keep(jnp.exp(z - m_new[:, None]))
      l = keep(l * a) + tree_sum(p)
      pz = keep(p * z)
      if support:
        pz = jnp.where(member, pz, 0)
      u = keep(u * a) + tree_sum(pz)
      m = m_new
    lse = m + keep(jnp.log(l))
    return chosen - lse, lse - keep(u * (1 / l))

  height = nx.ROW_TILE if numerics.exact else x_TD.shape[0]
  tiles = [
      x_TD.reshape(-1, height, x_TD.shape[1]),
      targets_T.reshape(-1, height),
  ]
  if support_Tk is not None:
    tiles.append(support_Tk.reshape(-1, height, support_Tk.shape[1]))
  logp, entropy = lax.map(tile, tiles)
  return logp.reshape(-1), entropy.reshape(-1)


def backward(
    x_TD,
    w_DV,
    targets_T,
    g_logp,
    g_entropy,
    temperature,
    numerics,
    support_Tk=None,
):
  """Returns dx [T, D] and dw [D, V], a few rows of logits at a time.

  ∂log p/∂z = onehot(y) - p;  ∂H/∂z = -p (z - Σ p z); both 0 outside a support.
  """
  count = x_TD.shape[0]
  height = BACKWARD_ROWS if count % BACKWARD_ROWS == 0 else nx.ROW_TILE
  if count % height:
    height = count

  def chunk(dw, args):
    x, y, g, h, *support = args
    z = numerics.dot(x, w_DV, _ROWS_BY_COLUMNS) * (1 / temperature)
    columns = jnp.arange(z.shape[1])
    if support:
      member = inside(columns, support[0])
      best = jnp.where(member, z, -jnp.inf).max(-1, keepdims=True)
      p = jnp.where(member, jnp.exp(z - best), 0)
    else:
      p = jnp.exp(z - z.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    mean = (p * z).sum(-1, keepdims=True)
    hit = y[:, None] == columns
    if support:
      hit &= member
    dz = g[:, None] * (hit - p) - h[:, None] * p * (z - mean)
    dz = dz * (1 / temperature)
    dx = numerics.dot(dz, w_DV.astype(nx.F32), (((1,), (1,)), ((), ())))
    dw = dw + numerics.dot(x.astype(nx.F32), dz, (((0,), (0,)), ((), ())))
    return dw, dx

  cut = lambda a: a.reshape(-1, height, *a.shape[1:])
  zero = jnp.zeros(w_DV.shape, nx.F32)
  args = [x_TD, targets_T, g_logp, g_entropy]
  if support_Tk is not None:
    args.append(support_Tk)
  dw, dx = lax.scan(chunk, zero, [cut(a) for a in args])
  return dx.reshape(x_TD.shape), dw
