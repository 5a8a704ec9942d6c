"""Row operations under the rules of `kernels_pallas.numerics`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas import numerics as nx


def rms_norm(x, gain, eps, numerics):
  """See `ops.rms_norm`."""
  keep = numerics.keep
  x = x.astype(nx.F32)
  mean = keep(numerics.tree_sum(keep(x * x)) * (1 / x.shape[-1]))
  y = numerics.cast(keep(x * lax.rsqrt(mean + eps)[..., None]))
  return numerics.cast(keep(y * gain.astype(nx.F32)))


def rope(x, positions, theta, numerics):
  """See `ops.rope`."""
  keep = numerics.keep
  half = x.shape[-1] // 2
  x = x.astype(nx.F32)
  # A constant of the program: a power could be folded in one, run in another.
  wave = np.asarray(theta ** (-np.arange(half) / half), np.float32)
  angle = keep(positions[:, None].astype(nx.F32) * wave)
  cos, sin = keep(jnp.cos(angle))[:, None], keep(jnp.sin(angle))[:, None]
  a, b = x[..., :half], x[..., half:]
  left = keep(a * cos) - keep(b * sin)
  right = keep(b * cos) + keep(a * sin)
  return numerics.cast(jnp.concatenate([left, right], -1))


def router(logits, bias, topk, gating, numerics):
  """See `ops.router`."""
  keep = numerics.keep
  logits = keep(logits.astype(nx.F32))
  scores = keep(jax.nn.sigmoid(logits)) if gating == 'sigmoid' else logits
  experts = lax.top_k(lax.stop_gradient(scores) + bias, topk)[1]
  return _weights(scores, experts, gating, numerics), experts.astype(jnp.int32)


def router_weights(logits, experts, gating, numerics):
  """See `ops.router_weights`."""
  keep = numerics.keep
  logits = keep(logits.astype(nx.F32))
  scores = keep(jax.nn.sigmoid(logits)) if gating == 'sigmoid' else logits
  return _weights(scores, experts, gating, numerics)


def _weights(scores, experts, gating, numerics):
  keep = numerics.keep
  chosen = jnp.take_along_axis(scores, experts, -1)
  if gating == 'softmax':
    best = lax.stop_gradient(jnp.max(chosen, -1, keepdims=True))
    chosen = keep(jnp.exp(chosen - best))
  return keep(chosen * (1 / numerics.tree_sum(chosen))[..., None])


def swiglu(gate, up, numerics):
  """See `ops.swiglu`."""
  keep = numerics.keep
  gate, up = gate.astype(nx.F32), up.astype(nx.F32)
  return numerics.cast(keep(keep(gate * jax.nn.sigmoid(gate)) * up))
