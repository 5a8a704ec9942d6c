"""Log-prob head, the obvious way."""

import jax
import jax.numpy as jnp


def logits(x_TD, w_DV, temperature, numerics):
  """Returns float32 [T, V]."""
  del numerics
  z = jnp.einsum('td,dv->tv', x_TD, w_DV, precision='highest')
  return z.astype(jnp.float32) / temperature


def logprobs(x_TD, w_DV, targets_T, temperature, numerics):
  """See `ops.logprobs`."""
  z = jax.nn.log_softmax(logits(x_TD, w_DV, temperature, numerics), -1)
  logp = jnp.take_along_axis(z, targets_T[:, None], -1)[:, 0]
  return logp, -(jnp.exp(z) * z).sum(-1)
