"""The policy's parameters: flax nnx modules whose layers are stacked.

A module only declares parameters, each with the logical axes along which a mesh
may cut it. What they compute is the one `forward` in `forward.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_rl.policy.config import PolicyConfig


class Balance(nnx.Variable):
  """A router's selection bias: moved by load, not by the gradient."""


def _normal(rngs, cfg, shape, axes, fan_in):
  value = jax.random.normal(rngs.params(), shape) * fan_in**-0.5
  return nnx.Param(cfg.numerics.cast(value), logical_axes=axes)


def _ones(cfg, shape, axes):
  return nnx.Param(cfg.numerics.cast(jnp.ones(shape)), logical_axes=axes)


class Layer(nnx.Module):
  """One decoder layer, stacked `stack` times along the first axis.

  Args:
    cfg: shape of the policy.
    stack: leading axis of every parameter; () for a single layer.
    moe: experts, or a dense feed-forward.
    rngs: source of the initial values.
  """

  def __init__(
      self, cfg: PolicyConfig, stack: tuple[int, ...], moe: bool, rngs
  ):
    d, h = cfg.width, cfg.head_width
    lead = ('layers',) * len(stack)

    def matrix(shape, axes, fan_in):
      return _normal(rngs, cfg, stack + shape, lead + axes, fan_in)

    depth = max(1, 2 * cfg.layers)
    self.attention_norm = _ones(cfg, stack + (d,), lead + ('embed',))
    self.query_norm = _ones(cfg, stack + (h,), lead + (None,))
    self.key_norm = _ones(cfg, stack + (h,), lead + (None,))
    q, kv = cfg.heads * h, 2 * cfg.kv_heads * h
    self.query = matrix((d, q), ('embed', 'heads'), d)
    self.key_value = matrix((d, kv), ('embed', 'kv_heads'), d)
    if cfg.attention_sink:
      zeros = cfg.numerics.cast(jnp.zeros(stack + (cfg.heads,)))
      self.sink = nnx.Param(zeros, logical_axes=lead + ('heads',))
    self.output = matrix((q, d), ('heads', 'embed'), q * depth)
    self.ffn_norm = _ones(cfg, stack + (d,), lead + ('embed',))
    if moe:
      e, f = cfg.experts, cfg.expert_width
      self.router = matrix((d, e), ('embed', None), d)
      self.balance = Balance(jnp.zeros(stack + (e,)))
      expert_in = ('expert', 'embed', 'expert_mlp')
      self.expert_in = matrix((e, d, 2 * f), expert_in, d)
      self.expert_out = matrix(
          (e, f, d), ('expert', 'expert_mlp', 'embed'), f * depth
      )
    width = cfg.shared_width if moe else cfg.dense_width
    if width:
      self.dense_in = matrix((d, 2 * width), ('embed', 'mlp'), d)
      self.dense_out = matrix((width, d), ('mlp', 'embed'), width * depth)


class Policy(nnx.Module):
  """All parameters of a policy.

  Args:
    cfg: shape of the policy.
    rngs: source of the initial values.
  """

  def __init__(self, cfg: PolicyConfig, rngs: nnx.Rngs):
    self.embedding = _normal(
        rngs, cfg, (cfg.vocab, cfg.width), ('vocab', 'embed'), 1
    )
    self.first = nnx.List(
        [Layer(cfg, (), False, rngs) for _ in range(cfg.dense_layers)]
    )
    self.pattern = nnx.List(
        [
            Layer(cfg, (cfg.groups,), bool(cfg.experts), rngs)
            for _ in (cfg.pattern if cfg.groups else '')
        ]
    )
    self.final_norm = _ones(cfg, (cfg.width,), ('embed',))
    if not cfg.tied:
      self.head = _normal(
          rngs, cfg, (cfg.width, cfg.vocab), ('embed', 'vocab'), cfg.width
      )


def init(cfg: PolicyConfig, seed: int) -> dict[str, Any]:
  """Returns the weights: a pure nested dict of arrays.

  Args:
    cfg: shape of the policy.
    seed: of the initial values.
  """
  policy = Policy(cfg, nnx.Rngs(params=seed))
  return nnx.to_pure_dict(nnx.state(policy))


def logical_axes(cfg: PolicyConfig) -> dict[str, Any]:
  """Returns the tree of logical axis names of every weight."""
  policy = nnx.eval_shape(lambda: Policy(cfg, nnx.Rngs(params=0)))
  axes = lambda v: v.get_metadata().get('logical_axes')
  state = nnx.state(policy)
  return nnx.to_pure_dict(
      jax.tree.map(axes, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
  )


def is_balance(path) -> bool:
  """True for the routers' biases, which no optimizer touches."""
  return any(getattr(p, 'key', None) == 'balance' for p in path)
