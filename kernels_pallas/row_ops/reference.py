"""Row operations, the obvious way."""

import jax
import jax.numpy as jnp


def rms_norm(x, gain, eps, numerics):
  """See `ops.rms_norm`."""
  x = x.astype(jnp.float32)
  y = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
  return numerics.cast(numerics.cast(y) * gain)


def rope(x, positions, theta, numerics):
  """See `ops.rope`."""
  half = x.shape[-1] // 2
  wave = theta ** (-jnp.arange(half) / half)
  angle = positions[:, None, None] * wave
  a, b = x[..., :half], x[..., half:]
  turned = [
      a * jnp.cos(angle) - b * jnp.sin(angle),
      b * jnp.cos(angle) + a * jnp.sin(angle),
  ]
  return numerics.cast(jnp.concatenate(turned, -1))


def router(logits, bias, topk, gating, numerics):
  """See `ops.router`."""
  scores = jax.nn.sigmoid(logits) if gating == 'sigmoid' else logits
  experts = jnp.argsort(-(scores + bias), -1, stable=True)[..., :topk]
  return router_weights(logits, experts, gating, numerics), experts


def router_weights(logits, experts, gating, numerics):
  """See `ops.router_weights`."""
  del numerics
  scores = jax.nn.sigmoid(logits) if gating == 'sigmoid' else logits
  chosen = jnp.take_along_axis(scores, experts, -1)
  if gating == 'softmax':
    return jax.nn.softmax(chosen, -1)
  return chosen / chosen.sum(-1, keepdims=True)


def swiglu(gate, up, numerics):
  """See `ops.swiglu`."""
  return numerics.cast(jax.nn.silu(gate) * up)
