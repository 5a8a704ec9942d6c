"""Log-prob head, the obvious way."""

import jax
import jax.numpy as jnp


def logits(x_TD, w_DV, temperature, numerics):
  """Returns float32 [T, V]."""
  del numerics
  z = jnp.einsum('td,dv->tv', x_TD, w_DV, precision='highest')
  return z.astype(jnp.float32) / temperature


def logprobs(x_TD, w_DV, targets_T, temperature, numerics, support_Tk=None):
  """See `ops.logprobs`."""
  z = logits(x_TD, w_DV, temperature, numerics)
  if support_Tk is not None:
    kept = jax.nn.one_hot(support_Tk, z.shape[1]).any(1)
    kept |= ~kept.any(-1, keepdims=True)
    z = jax.nn.log_softmax(z, -1, where=kept)
    z = jnp.where(kept, z, -jnp.inf)
    p = jnp.exp(z)
    entropy = -(p * jnp.where(kept, z, 0)).sum(-1)
    return jnp.take_along_axis(z, targets_T[:, None], -1)[:, 0], entropy
  z = jax.nn.log_softmax(z, -1)
  logp = jnp.take_along_axis(z, targets_T[:, None], -1)[:, 0]
  return logp, -(jnp.exp(z) * z).sum(-1)
