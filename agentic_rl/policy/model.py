"""The policy's parameters: flax nnx modules whose layers are stacked.

A module only declares parameters, each with the logical axes along which a mesh
may cut it. What they compute is the one `forward` in `forward.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_rl.parallel import mesh
from agentic_rl.policy.config import PolicyConfig


class Balance(nnx.Variable):
  """A router's selection bias: moved by load, not by the gradient."""


class _Maker:
  """Makes parameters, each where the mesh wants it."""

  def __init__(self, cfg, rngs, parallel):
    self.cfg, self.rngs, self.parallel = cfg, rngs, parallel

  def normal(self, shape, axes, fan_in):
    # The draw alone is a program, so that it has the same bits on any mesh.
    draw = jax.jit(
        jax.random.normal,
        static_argnums=1,
        out_shardings=self.parallel.sharding(axes),
    )
    value = draw(self.rngs.params(), shape) * fan_in**-0.5
    return nnx.Param(self.cfg.numerics.cast(value), logical_axes=axes)

  def full(self, shape, axes, value, kind=nnx.Param):
    whole = jnp.full(shape, value, jnp.float32)
    if kind is nnx.Param:
      whole = self.cfg.numerics.cast(whole)
    if self.parallel.mesh is not None:
      whole = jax.device_put(whole, self.parallel.sharding(axes))
    return kind(whole, logical_axes=axes)


class Layer(nnx.Module):
  """One decoder layer, stacked `stack` times along the first axis.

  Args:
    cfg: shape of the policy.
    stack: leading axis of every parameter; () for a single layer.
    moe: experts, or a dense feed-forward.
    make: of the initial values.
  """

  def __init__(
      self, cfg: PolicyConfig, stack: tuple[int, ...], moe: bool, make: _Maker
  ):
    d, h = cfg.width, cfg.head_width
    lead = ('layers',) * len(stack)

    def matrix(shape, axes, fan_in):
      return make.normal(stack + shape, lead + axes, fan_in)

    def ones(size, axis):
      return make.full(stack + (size,), lead + (axis,), 1)

    depth = max(1, 2 * cfg.layers)
    self.attention_norm = ones(d, 'embed')
    self.query_norm = ones(h, None)
    self.key_norm = ones(h, None)
    q, kv = cfg.heads * h, 2 * cfg.kv_heads * h
    self.query = matrix((d, q), ('embed', 'heads'), d)
    self.key_value = matrix((d, kv), ('embed', 'kv_heads'), d)
    if cfg.attention_sink:
      self.sink = make.full(stack + (cfg.heads,), lead + ('heads',), 0)
    self.output = matrix((q, d), ('heads', 'embed'), q * depth)
    self.ffn_norm = ones(d, 'embed')
    if moe:
      e, f = cfg.experts, cfg.expert_width
      self.router = matrix((d, e), ('embed', None), d)
      self.balance = make.full(stack + (e,), lead + (None,), 0, Balance)
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
    rngs: source of the initial values, which are the same on any mesh.
    parallel: the mesh on which they live.
  """

  def __init__(
      self,
      cfg: PolicyConfig,
      rngs: nnx.Rngs,
      parallel: mesh.Parallel = mesh.SINGLE,
  ):
    make = _Maker(cfg, rngs, parallel)
    self.embedding = make.normal((cfg.vocab, cfg.width), ('vocab', 'embed'), 1)
    self.first = nnx.List(
        [Layer(cfg, (), False, make) for _ in range(cfg.dense_layers)]
    )
    self.pattern = nnx.List(
        [
            Layer(cfg, (cfg.groups,), bool(cfg.experts), make)
            for _ in (cfg.pattern if cfg.groups else '')
        ]
    )
    self.final_norm = make.full((cfg.width,), ('embed',), 1)
    if not cfg.tied:
      self.head = make.normal(
          (cfg.width, cfg.vocab), ('embed', 'vocab'), cfg.width
      )


def init(
    cfg: PolicyConfig, seed: int, parallel: mesh.Parallel = mesh.SINGLE
) -> dict[str, Any]:
  """Returns the weights: a pure nested dict of arrays.

  Args:
    cfg: shape of the policy.
    seed: of the initial values, which are the same on any mesh.
    parallel: where they live.

  Raises:
    ValueError: if the mesh can not cut a weight.
  """
  if parallel.mesh is not None:
    shapes = jax.eval_shape(lambda: init(cfg, seed))
    mesh.check(parallel, shapes, logical_axes(cfg))
  policy = Policy(cfg, nnx.Rngs(params=seed), parallel)
  return nnx.to_pure_dict(nnx.state(policy))


@functools.cache
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
