"""Optimizers by name: Adam, and Muon on the layers' matrices."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agentic_rl.policy import model

# Matrices inside the layers; their last two axes are [in, out].
_MATRICES = frozenset((
    'query', 'key_value', 'output', 'expert_in', 'expert_out', 'dense_in',
    'dense_out',
))  # fmt: skip


def make(
    name: str,
    *,
    learning_rate: float,
    steps: int,
    warmup: int = 0,
    decay: str = 'constant',
    clip_norm: float = 1.0,
    weight_decay: float = 0.0,
    b2: float = 0.95,
    cast: Callable[[jax.Array], jax.Array] | None = None,
) -> optax.GradientTransformation:
  """Returns an optimizer that leaves the routers' balance biases alone.

  Args:
    name: 'adam', or 'muon' (Source: arXiv:2502.16982) with Nesterov Adam,
      never decayed, on all that is not a matrix of a layer.
    learning_rate: peak.
    steps: length of the schedule in updates.
    warmup: updates of linear warm-up.
    decay: 'constant', 'linear' or 'cosine', to zero at `steps`.
    clip_norm: bound of the gradient's global norm.
    weight_decay: decoupled decay.
    b2: second-moment decay of Adam.
    cast: how the caller rounds the weights after an update; the state then
      keeps them unrounded. None where they are not rounded.

  Raises:
    ValueError: on an unknown name or decay, or a number out of range.
  """
  for field, value, allowed, holds in (
      ('learning_rate', learning_rate, '0 or above', learning_rate >= 0),
      ('warmup', warmup, '0 or above', warmup >= 0),
      ('clip_norm', clip_norm, 'above 0', clip_norm > 0),
      ('weight_decay', weight_decay, '0 or above', weight_decay >= 0),
      ('b2', b2, '0 to below 1', 0 <= b2 < 1),
  ):
    if not holds:
      raise ValueError(f'{field}={value} of optimizer {name!r}: {allowed}')
  rate = schedule(learning_rate, steps, warmup, decay)
  if name == 'adam':
    rule = optax.adamw(rate, b1=0.9, b2=b2, weight_decay=weight_decay)
  elif name == 'muon':
    rule = optax.contrib.muon(
        rate,
        weight_decay=weight_decay,
        adam_b2=b2,
        muon_weight_dimension_numbers=_matrices,
        consistent_rms=0.2,
    )
  else:
    raise ValueError(f"optimizer {name!r}: allowed are 'adam' and 'muon'")
  if cast is not None:
    rule = _unrounded(rule, cast)

  def labels(weights):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: 'held' if model.is_balance(path) else 'trained', weights
    )

  return optax.chain(
      optax.clip_by_global_norm(clip_norm),
      optax.multi_transform(
          {'trained': rule, 'held': optax.set_to_zero()}, labels
      ),
  )


class Unrounded(NamedTuple):
  """State of a rule whose weights are rounded after every update.

  Attributes:
    inner: state of the rule.
    weights: float32, before rounding.
  """

  inner: Any
  weights: Any


def _unrounded(
    rule: optax.GradientTransformation,
    cast: Callable[[jax.Array], jax.Array],
) -> optax.GradientTransformation:
  """Applies a rule to unrounded weights, so that small steps add up.

  A bfloat16 number has 8 bits: a step of less than 1/512 of a weight would be
  rounded away, in every update anew.
  """

  def init(weights):
    # Copies: the caller may donate weights and state together.
    whole = jax.tree.map(
        lambda w: jnp.array(w, jnp.float32, copy=True), weights
    )
    return Unrounded(rule.init(whole), whole)

  def update(grads, state, weights=None):
    steps, inner = rule.update(grads, state.inner, state.weights)
    whole = optax.apply_updates(state.weights, steps)
    change = jax.tree.map(
        lambda new, old: cast(new).astype(jnp.float32) - old, whole, weights
    )
    return change, Unrounded(inner, whole)

  return optax.GradientTransformation(init, update)


def schedule(rate: float, steps: int, warmup: int, decay: str):
  """Returns the learning rate as a function of the update number.

  Raises:
    ValueError: on an unknown decay.
  """
  rest = max(1, steps - warmup)
  tails = {
      'constant': optax.constant_schedule(rate),
      'linear': optax.linear_schedule(rate, 0.0, rest),
      'cosine': optax.cosine_decay_schedule(rate, rest),
  }
  if decay not in tails:
    raise ValueError(f'decay={decay!r}: allowed are {sorted(tails)}')
  if not warmup:
    return tails[decay]
  ramp = optax.linear_schedule(0.0, rate, warmup)
  return optax.join_schedules([ramp, tails[decay]], [warmup])


def _matrices(weights: Any):
  def spec(path, leaf):
    if getattr(path[-1], 'key', None) not in _MATRICES:
      return None
    return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

  return jax.tree_util.tree_map_with_path(spec, weights)


def state_shardings(
    optimizer: optax.GradientTransformation, weights, shardings, other
) -> Any:
  """Returns where the state lives: moments beside their weights.

  Args:
    optimizer: from `make`.
    weights: shapes of the weights.
    shardings: the tree of their shardings.
    other: sharding of counts and the like.
  """
  flat, tree = jax.tree.flatten_with_path(weights)
  of = {
      jax.tree_util.keystr(path): (leaf.shape, sharding)
      for (path, leaf), sharding in zip(flat, tree.flatten_up_to(shardings))
  }

  def leaf(path, value):
    # A moment's path ends with that of its weight.
    for start in range(len(path)):
      shape, sharding = of.get(jax.tree_util.keystr(path[start:]), ((), None))
      if sharding is not None and shape == value.shape:
        return sharding
    return other

  state = jax.eval_shape(optimizer.init, weights)
  return jax.tree.map_with_path(leaf, state)
