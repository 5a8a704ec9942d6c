"""Routes of tokens: what is recorded of them, and how the learner replays it.

A route is, for one token and layer, its experts in slot order and the weight of
each. The sampler records the experts, and the weights too where a learner asks
for them. A learner whose weights differ from the sampler's then sends each token
to the experts that were at work when it was drawn.

  ids              g_i = exp(s_i) / Σ_j exp(s_j) over the recorded experts, s the
                   learner's own router logits, so the router learns.
                   Source: R3, arXiv:2510.11370, the equation of g_replay. Where
                   sampler and learner agree it is also R2, the replay of the
                   learner's own routes (arXiv:2507.18071 section 5.3).
  ids_and_weights  the value is the recorded weight, the gradient that of 'ids'
                   (straight-through, arXiv:1308.3432 section 3): the forward is
                   the sampler's, and the router still learns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from agentic_rl.policy.config import PolicyConfig
from kernels_pallas.row_ops import ops as rows

MODES = ('none', 'ids', 'ids_and_weights')
# A recorded route with its weight; without, it is an int16 expert.
RECORD = np.dtype([('expert', np.int16), ('weight', np.float32)])


class Routes(NamedTuple):
  """Experts and weights of tokens, [T, topk] or with leading layers.

  Attributes:
    experts: int32 in slot order; -1 in a recorded route that is not known.
    weights: float32, or None.
  """

  experts: Any
  weights: Any = None


def check(mode: str) -> None:
  """Raises ValueError on an unknown mode."""
  if mode not in MODES:
    raise ValueError(f'routing_replay={mode!r}: allowed are {list(MODES)}')


def check_recorded(routes, mode: str, cfg: PolicyConfig) -> None:
  """Checks that recorded routes can be replayed.

  Args:
    routes: [..., L_moe, topk] int16 or `RECORD`, or None.
    mode: one of `MODES` but 'none'.
    cfg: shape of the policy.

  Raises:
    ValueError: if there are none, they lack the weights, have another shape or
      name an expert that is not there.
  """
  if not cfg.moe_layers:
    raise ValueError(f'routing_replay={mode!r}: the policy has no experts')
  if routes is None:
    raise ValueError(f'routing_replay={mode!r}: the batch holds no routes')
  if mode == 'ids_and_weights' and not routes.dtype.names:
    raise ValueError(
        f'routing_replay={mode!r}: the routes hold no weights; an engine records'
        ' them with route_weights=True'
    )
  shape = cfg.moe_layers, cfg.topk_experts
  if routes.shape[-2:] != shape:
    raise ValueError(
        f'routes {routes.shape}: the policy has {shape} layers and slots'
    )
  experts = routes['expert'] if routes.dtype.names else routes
  low, high = experts.min(initial=-1), experts.max(initial=-1)
  if low < -1 or high >= cfg.experts:
    raise ValueError(
        f'routes to the experts {low}..{high}: allowed are 0..'
        f'{cfg.experts - 1}, and -1 for an unknown route'
    )


def split(routes) -> dict[str, np.ndarray]:
  """Returns what recorded routes hold as plain arrays, by name.

  Args:
    routes: int16 or `RECORD`, any shape.
  """
  if not routes.dtype.names:
    return {'routes': routes}
  return {
      'routes': np.ascontiguousarray(routes['expert']),
      'route_weights': np.ascontiguousarray(routes['weight']),
  }


def join(experts, weights) -> np.ndarray:
  """Returns experts and weights of equal shape as one array of `RECORD`."""
  out = np.empty(experts.shape, RECORD)
  out['expert'], out['weight'] = experts, weights
  return out


def recorded(batch, mode: str) -> Routes | None:
  """Returns the routes that a learner's batch asks to replay, by layer.

  Args:
    batch: a dict with 'routes' and perhaps 'route_weights' [T, L_moe, topk].
    mode: one of `MODES`.
  """
  if mode == 'none':
    return None
  by_layer = lambda a: jnp.transpose(a, (1, 0, 2))
  experts = by_layer(batch['routes']).astype(jnp.int32)
  if mode == 'ids':
    return Routes(experts)
  return Routes(experts, by_layer(batch['route_weights']))


def empty(count: int, cfg: PolicyConfig, weigh: bool):
  """Returns the routes of `count` tokens in a policy without routers."""
  experts = jnp.zeros((0, count, cfg.topk_experts), jnp.int32)
  return Routes(experts, experts.astype(jnp.float32)) if weigh else experts


def route(logits_TE, balance_E, given: Routes | None, cfg: PolicyConfig):
  """Sends tokens to experts: the recorded ones, where they are known.

  Args:
    logits_TE: float32 [T, E] of the router.
    balance_E: float32 [E], its selection bias.
    given: recorded routes [T, topk], or None.
    cfg: shape of the policy.

  Returns:
    weights float32 [T, topk] and experts int32 [T, topk] to use, and the
    experts that the router itself would choose: what a forward returns, so that
    a flip is seen and balanced also where another route is replayed.
  """
  options: dict[str, Any] = dict(
      gating=cfg.gating, numerics=cfg.numerics, impl=cfg.impl
  )
  weights, own = rows.router(
      logits_TE, balance_E, topk=cfg.topk_experts, **options
  )
  if given is None:
    return weights, own, own
  known = (given.experts >= 0).all(-1, keepdims=True)
  used = jnp.where(known, given.experts, own)
  weights = rows.router_weights(logits_TE, used, **options)
  if given.weights is not None:
    value = jnp.where(known, given.weights, lax.stop_gradient(weights))
    weights = _straight_through(value, weights)
  return weights, used, own


@jax.custom_jvp
def _straight_through(value, source):
  """Returns `value`, with the derivative of `source`."""
  del source
  return value


_straight_through.defjvp(
    lambda primals, tangents: (_straight_through(*primals), tangents[1])
)
