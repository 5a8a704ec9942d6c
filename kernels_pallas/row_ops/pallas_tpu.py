"""Row operations as TPU kernels, each a chain that never leaves the chip.

Blocks are rows by whole width. How many rows depends on the width alone, and
no operation crosses rows, so a row's bits do not depend on its company.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import lanes
from kernels_pallas import numerics as nx

BLOCK = 1 << 18  # numbers in a block, 1 MiB of float32
ROWS = (16, 512)  # fewest and most rows of a block
COLUMNS = 1024  # widest block of the gate, which needs no whole rows


def _height(width: int) -> int:
  """Rows of a block whose rows hold `width` numbers."""
  rows = BLOCK // lanes.round_up(width, lanes.LANES)
  low, high = ROWS
  return min(high, max(low, lanes.power_of_two(rows + 1) // 2))


def _call(kernel, grid, in_specs, out_specs, out_shape, name):
  return pl.pallas_call(
      kernel,
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      interpret=nx.interpret(),
      name=name,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel',) * len(grid),
          vmem_limit_bytes=32 << 20,
      ),
  )


def _rms_norm_kernel(x_ref, gain_ref, y_ref, *, eps, numerics):
  keep = numerics.keep
  x = x_ref[...].astype(nx.F32)
  width = x.shape[-1]
  mean = keep(lanes.row_sums(keep(x * x), numerics) * (1 / width))
  y = numerics.cast(keep(x * lanes.column(lax.rsqrt(mean + eps), width)))
  y_ref[...] = numerics.cast(keep(y * gain_ref[...].astype(nx.F32)))


def rms_norm(x, gain, eps, numerics):
  """See `ops.rms_norm`."""
  width = x.shape[-1]
  rows = x.reshape(-1, width)
  height = _height(width)
  block = pl.BlockSpec((height, width), lambda i: (i, 0))
  y = _call(
      functools.partial(_rms_norm_kernel, eps=eps, numerics=numerics),
      (pl.cdiv(rows.shape[0], height),),
      [block, pl.BlockSpec((1, width), lambda i: (0, 0))],
      block,
      jax.ShapeDtypeStruct(rows.shape, numerics.storage),
      'rms_norm',
  )(rows, gain[None])
  return y.reshape(x.shape)


def _rope_kernel(x_ref, positions_ref, wave_ref, y_ref, *, numerics):
  keep = numerics.keep
  x = x_ref[...].astype(nx.F32)  # [rows, N, H]
  half = x.shape[-1] // 2
  angle = keep(positions_ref[...].astype(nx.F32) * wave_ref[...])
  cos, sin = keep(jnp.cos(angle)), keep(jnp.sin(angle))
  lane = lax.broadcasted_iota(jnp.int32, sin.shape, 1)
  sin = jnp.where(lane < half, -sin, sin)  # x_i c - x_j s, x_j c + x_i s
  if x.shape[-1] % lanes.LANES:
    other = jnp.concatenate([x[..., half:], x[..., :half]], -1)
  else:
    other = pltpu.roll(x, half, 2)
  y = keep(x * cos[:, None]) + keep(other * sin[:, None])
  y_ref[...] = numerics.cast(y)


def rope(x, positions, theta, numerics):
  """See `ops.rope`."""
  count, heads, width = x.shape
  half = width // 2
  # A constant of the program, as in xla.py; once for either half.
  wave = np.asarray(theta ** (-np.arange(half) / half), np.float32)
  height = _height(
      lanes.round_up(heads, 8) * lanes.round_up(width, lanes.LANES)
  )
  block = pl.BlockSpec((height, heads, width), lambda i: (i, 0, 0))
  return _call(
      functools.partial(_rope_kernel, numerics=numerics),
      (pl.cdiv(count, height),),
      [
          block,
          pl.BlockSpec((height, 1), lambda i: (i, 0)),
          pl.BlockSpec((1, width), lambda i: (0, 0)),
      ],
      block,
      jax.ShapeDtypeStruct(x.shape, numerics.storage),
      'rope',
  )(x, positions[:, None], jnp.asarray(np.tile(wave, 2)[None]))


def _router_kernel(
    logits_ref, bias_ref, weights_ref, experts_ref, *, gating, numerics
):
  keep, topk = numerics.keep, weights_ref.shape[-1]
  # Turned, [E, rows]: a maximum over experts is one over whole registers.
  scores = keep(logits_ref[...].astype(nx.F32).T)
  if gating == 'sigmoid':
    scores = keep(jax.nn.sigmoid(scores))
  rank = scores + bias_ref[...]
  # Rows of NaN choose some experts, too, each once.
  rank = jnp.where(rank == rank, rank, -jnp.inf)
  expert = lax.broadcasted_iota(jnp.int32, rank.shape, 0)
  free = jnp.ones(rank.shape, jnp.int32)
  chosen, experts = [], []
  for _ in range(topk):
    best = jnp.where(free > 0, rank, -jnp.inf).max(0, keepdims=True)
    best = jnp.where((free > 0) & (rank == best), expert, rank.shape[0])
    best = best.min(0, keepdims=True)
    hit = expert == best
    free = jnp.where(hit, 0, free)
    score = jnp.where(hit, scores, -jnp.inf).max(0, keepdims=True)
    chosen.append(score)
    experts.append(best)
  weights_ref[...] = _columns(_weights(chosen, gating, numerics))
  experts_ref[...] = _columns(experts)


def _weights(chosen, gating, numerics):
  """Normalises the scores of each slot."""
  keep = numerics.keep
  if gating == 'softmax':
    best = functools.reduce(jnp.maximum, chosen)
    chosen = [keep(jnp.exp(score - best)) for score in chosen]
  scale = 1 / lanes.tree_add(chosen)
  return [keep(score * scale) for score in chosen]


def _columns(rows):
  """Returns [R, n] of n rows [1, R]."""
  spare = [rows[0]] * (-len(rows) % lanes.SUBLANES)
  return jnp.concatenate([*rows, *spare], 0).T[:, : len(rows)]


def router(logits, bias, topk, gating, numerics):
  """See `ops.router`."""
  count, width = logits.shape
  height = _height(width)
  out = pl.BlockSpec((height, topk), lambda i: (i, 0))
  weights, experts = _call(
      functools.partial(_router_kernel, gating=gating, numerics=numerics),
      (pl.cdiv(count, height),),
      [
          pl.BlockSpec((height, width), lambda i: (i, 0)),
          pl.BlockSpec((width, 1), lambda i: (0, 0)),
      ],
      [out, out],
      [
          jax.ShapeDtypeStruct((count, topk), nx.F32),
          jax.ShapeDtypeStruct((count, topk), jnp.int32),
      ],
      'router',
  )(logits, bias[:, None])
  return weights, experts


def _router_weights_kernel(
    logits_ref, experts_ref, weights_ref, *, gating, numerics
):
  keep, topk = numerics.keep, weights_ref.shape[-1]
  scores = keep(logits_ref[...].astype(nx.F32))
  if gating == 'sigmoid':
    scores = keep(jax.nn.sigmoid(scores))
  expert = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
  chosen = []
  for i in range(topk):
    hit = expert == experts_ref[:, i : i + 1]
    score = jnp.where(hit, scores, -jnp.inf).max(-1, keepdims=True)
    chosen.append(score)
  slot = lax.broadcasted_iota(jnp.int32, weights_ref.shape, 1)
  out = jnp.zeros(weights_ref.shape, nx.F32)
  for i, weight in enumerate(_weights(chosen, gating, numerics)):
    out = jnp.where(slot == i, weight, out)
  weights_ref[...] = out


def router_weights(logits, experts, gating, numerics):
  """See `ops.router_weights`."""
  (count, width), topk = logits.shape, experts.shape[1]
  height = _height(width)
  slots = pl.BlockSpec((height, topk), lambda i: (i, 0))
  return _call(
      functools.partial(
          _router_weights_kernel, gating=gating, numerics=numerics
      ),
      (pl.cdiv(count, height),),
      [pl.BlockSpec((height, width), lambda i: (i, 0)), slots],
      slots,
      jax.ShapeDtypeStruct((count, topk), nx.F32),
      'router_weights',
  )(logits, experts)


def _swiglu_kernel(gate_ref, up_ref, y_ref, *, numerics):
  keep = numerics.keep
  gate, up = gate_ref[...].astype(nx.F32), up_ref[...].astype(nx.F32)
  y_ref[...] = numerics.cast(keep(keep(gate * jax.nn.sigmoid(gate)) * up))


def swiglu(gate, up, numerics):
  """See `ops.swiglu`."""
  count, total = gate.shape
  width = min(total, COLUMNS)
  height = _height(width)
  block = pl.BlockSpec((height, width), lambda i, j: (i, j))
  return _call(
      functools.partial(_swiglu_kernel, numerics=numerics),
      (pl.cdiv(count, height), pl.cdiv(total, width)),
      [block, block],
      block,
      jax.ShapeDtypeStruct(gate.shape, numerics.storage),
      'swiglu',
  )(gate, up)
