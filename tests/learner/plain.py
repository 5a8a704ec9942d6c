"""The policy and its loss the obvious way: one unpacked sequence at a time.

Plain jax.numpy and its own derivatives; shares no code with what it checks.
"""

import jax
import jax.numpy as jnp
import numpy as np


def decoder(weights, tokens, cfg, temperature, routes=None, shares=None):
  """Returns log-softmax [T, V] of one sequence.

  With `routes` [L, T, topk] the experts are these, and with `shares` so are
  their weights.
  """
  x = weights['embedding'][tokens]
  for group in range(cfg.groups):
    for i, kind in enumerate(cfg.pattern):
      w = jax.tree.map(lambda a, g=group: a[g], weights['pattern'][i])
      x = x + _attention(_norm(x, w['attention_norm']), w, kind, cfg)
      n = group * len(cfg.pattern) + i
      given = None if routes is None else routes[n]
      share = None if shares is None else shares[n]
      x = x + _experts(_norm(x, w['ffn_norm']), w, cfg, given, share)
  z = _norm(x, weights['final_norm']) @ weights['head'] / temperature
  return jax.nn.log_softmax(z, -1)


def loss(weights, examples, cfg, *, temperature, entropy=0.0):
  """Mean over the trained tokens of -ρ A - entropy x H, without clipping."""
  total, count = 0.0, 0.0
  for e in examples:
    z = decoder(weights, e.tokens, cfg, temperature)[:-1]
    logp = jnp.take_along_axis(z, e.tokens[1:, None], -1)[:, 0]
    ratio = jnp.exp(logp - e.logp_behavior[1:])
    value = -ratio * e.advantages[1:]
    value -= entropy * -(jnp.exp(z) * z).sum(-1)
    total += (e.weights[1:] * value).sum()
    count += e.weights[1:].sum()
  return total / count


def _norm(x, gain):
  return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def _rope(x, theta):
  half = x.shape[-1] // 2
  wave = theta ** (-np.arange(half) / half)
  turn = jnp.exp(1j * np.arange(len(x))[:, None, None] * wave)
  z = (x[..., :half] + 1j * x[..., half:]) * turn
  return jnp.concatenate([z.real, z.imag], -1)


def _attention(h, w, kind, cfg):
  length, width = len(h), cfg.head_width
  q = (h @ w['query']).reshape(length, cfg.kv_heads, -1, width)
  kv = (h @ w['key_value']).reshape(length, cfg.kv_heads, 2 * width)
  shape = q.shape
  q = _norm(q, w['query_norm']).reshape(length, -1, width)
  q = _rope(q, cfg.rope_theta).reshape(shape)
  k = _rope(_norm(kv[..., :width], w['key_norm']), cfg.rope_theta)
  at = np.arange(length)
  seen = np.broadcast_to(
      (at <= at[:, None])[:, None], (length, cfg.kv_heads, length)
  )
  if kind == 'w':
    seen = seen & (at > at[:, None] - cfg.window)[:, None]
  if kind == 'b':
    seen = seen & _selected(q, k, cfg)
  s = jnp.einsum('tkgh,skh->tkgs', q, k) * width**-0.5
  p = jax.nn.softmax(jnp.where(seen[:, :, None], s, -jnp.inf), -1)
  out = jnp.einsum('tkgs,skh->tkgh', p, kv[..., width:])
  return out.reshape(length, -1) @ w['output']


def _selected(q, k, cfg):
  """True [T, K, S] in the current page and in the pages that score best."""
  page = np.arange(len(k)) // cfg.page
  seen = (page == page[:, None])[:, None]
  means = [k[page == n].mean(0) for n in range(page[-1])]
  if not means:
    return seen
  score = jnp.einsum('tkgh,nkh->tkn', q, jnp.stack(means))
  score = jnp.where(
      np.arange(len(means)) < page[:, None, None], score, -jnp.inf
  )
  rank = jnp.argsort(jnp.argsort(-score, -1), -1)
  picked = (rank < cfg.topk_pages) & (score > -jnp.inf)
  whole = jnp.pad(picked, [(0, 0), (0, 0), (0, 1)])[..., page]
  return seen | whole


def _experts(h, w, cfg, given=None, shares=None):
  logits = h @ w['router']
  score, chosen = jax.lax.top_k(logits + w['balance'], cfg.topk_experts)
  share = jax.nn.softmax(jnp.take_along_axis(logits, chosen, -1), -1)
  del score
  if given is not None:
    chosen = given
    share = jax.nn.softmax(jnp.take_along_axis(logits, chosen, -1), -1)
  if shares is not None:
    share = shares
  a = jnp.einsum('td,edf->tef', h, w['expert_in'])
  half = a.shape[-1] // 2
  a = jax.nn.silu(a[..., :half]) * a[..., half:]
  y = jnp.einsum('tef,efd->ted', a, w['expert_out'])
  y = jnp.take_along_axis(y, chosen[..., None], 1)
  return (share[..., None] * y).sum(1)
