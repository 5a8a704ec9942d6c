"""Row operations for Hopper GPUs, each a chain that never leaves a block.

A block is 64 rows, laid out over the threads as the tensor core does it: four
neighbours share a row, in tiles of so many columns that all registers suffice.
No operation crosses rows, and the order of a sum depends on the width alone, so
a row's bits do not depend on its company.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import lanes
from kernels_pallas import numerics as nx
from kernels_pallas import warpgroup

ROWS = 64  # of a block
COLUMNS = 64  # that are computed at once
WIDTH = 64  # that of a head is a multiple of
EXPERTS = 256  # of a router, at most: they stay in registers


def _pad(x, *units: int, fill=0):
  """Pads the first dimensions to multiples of the units."""
  ends = [-n % unit for n, unit in zip(x.shape, units)]
  widths = [(0, end) for end in ends] + [(0, 0)] * (x.ndim - len(units))
  return jnp.pad(x, widths, constant_values=fill) if any(ends) else x


def _block(i):
  return pl.ds(i * ROWS, ROWS)


def _spread(x):
  """Repeats a number of each column along the rows of a block."""
  return lax.broadcast_in_dim(x, (ROWS, x.shape[0]), (1,))


def _write(y, memory, y_ref, *place):
  """Sends a tile of the result to memory."""
  memory[...] = y
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(memory, y_ref.at[place])
  plgpu.wait_smem_to_gmem(0)


def rms_norm(x, gain, eps, numerics):
  """See `ops.rms_norm`."""
  width = x.shape[-1]
  rows = x.reshape(-1, width)
  count = rows.shape[0]
  rows = _pad(rows, ROWS, COLUMNS)
  tiles = rows.shape[1] // COLUMNS

  def kernel(x_ref, gain_ref, y_ref, memory):
    block = _block(lax.axis_index('rows'))

    def load(i):
      columns = pl.ds(i * COLUMNS, COLUMNS)
      return warpgroup.load_tile(x_ref, block, columns), columns

    def square(i, total):
      x, _ = load(i)
      return total + warpgroup.keep(x * x)

    total = jnp.zeros((ROWS, COLUMNS), nx.F32)
    total = warpgroup.row_sums(lax.fori_loop(0, tiles, square, total))
    scale = lax.rsqrt(warpgroup.keep(total * (1 / width)) + eps)

    @pl.loop(0, tiles)
    def _(i):
      x, columns = load(i)
      gain = warpgroup.load(gain_ref, columns).astype(nx.F32)
      y = numerics.cast(x * warpgroup.wide(scale, COLUMNS)).astype(nx.F32)
      _write(numerics.cast(y * _spread(gain)), memory, y_ref, block, columns)

  y = warpgroup.kernel(
      kernel,
      name='rms_norm',
      grid=dict(rows=rows.shape[0] // ROWS),
      out=jax.ShapeDtypeStruct(rows.shape, numerics.storage),
      scratch=[plgpu.SMEM((ROWS, COLUMNS), numerics.storage)],
  )(rows, _pad(gain, COLUMNS))
  return y[:count, :width].reshape(x.shape)


def rope(x, positions, theta, numerics):
  """See `ops.rope`.

  Raises:
    ValueError: on a head width that the kernel does not take.
  """
  count, heads, width = x.shape
  if width % WIDTH and not nx.interpret():
    raise ValueError(
        f'x_TNH {x.shape}: head width {width}, on gpu a multiple of {WIDTH} is'
        ' allowed'
    )
  half = width // 2
  # A constant of the program, as in xla.py.
  wave = np.asarray(theta ** (-np.arange(half) / half), np.float32)
  rows = _pad(x.reshape(count, heads, 2, half), ROWS)

  def kernel(x_ref, positions_ref, wave_ref, y_ref, memory):
    block, head = _block(lax.axis_index('rows')), lax.axis_index('heads')
    position = warpgroup.load_rows(positions_ref, block).astype(nx.F32)
    wave = _spread(warpgroup.load(wave_ref, pl.ds(0, half)))
    angle = warpgroup.keep(warpgroup.wide(position, half) * wave)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = (
        warpgroup.load_tile(x_ref, block, head, i, pl.ds(0, half))
        for i in range(2)
    )
    keep = warpgroup.keep
    left = keep(a * cos) - keep(b * sin)
    right = keep(b * cos) + keep(a * sin)
    for i, y in enumerate((left, right)):
      _write(numerics.cast(y), memory, y_ref, block, head, i)

  y = warpgroup.kernel(
      kernel,
      name='rope',
      grid=dict(rows=rows.shape[0] // ROWS, heads=heads),
      out=jax.ShapeDtypeStruct(rows.shape, numerics.storage),
      scratch=[plgpu.SMEM((ROWS, half), numerics.storage)],
  )(rows, _pad(positions, ROWS), jnp.asarray(wave))
  return y[:count].reshape(x.shape)


def router(logits, bias, topk, gating, numerics):
  """See `ops.router`.

  Raises:
    ValueError: on more experts than the kernel takes.
  """
  del numerics
  count, width = logits.shape
  _check_experts(logits)
  logits = _pad(logits, ROWS, COLUMNS)
  size = logits.shape[1]

  def kernel(logits_ref, bias_ref, weights_ref, experts_ref, *memory):
    weights, experts = memory
    block = _block(lax.axis_index('rows'))
    scores = _scores(logits_ref, block, gating)
    rank = scores + _spread(warpgroup.load(bias_ref, pl.ds(0, size)))
    column = lax.broadcasted_iota(jnp.int32, rank.shape, 1)
    # Rows of NaN choose some experts, too, each once.
    rank = jnp.where(rank > -3e38, rank, -3e38)
    rank = jnp.where(column < width, rank, -jnp.inf)

    # In a loop: unrolled, it would not do with the registers.
    def choose(slot, rank):
      best = warpgroup.wide(rank.max(1), size)
      best = jnp.where(rank == best, column, size).min(1)
      hit = column == warpgroup.wide(best, size)
      experts[slot] = best
      weights[slot] = jnp.where(hit, scores, -jnp.inf).max(1)
      return jnp.where(hit, -jnp.inf, rank)

    lax.fori_loop(0, topk, choose, rank)
    _normalise(weights, gating)
    plgpu.commit_smem()
    for source, target in ((weights, weights_ref), (experts, experts_ref)):
      plgpu.copy_smem_to_gmem(source, target.at[:, block])
    plgpu.wait_smem_to_gmem(0)

  shape = topk, logits.shape[0]
  out = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (nx.F32, jnp.int32)]
  weights, experts = warpgroup.kernel(
      kernel,
      name='router',
      grid=dict(rows=logits.shape[0] // ROWS),
      out=out,
      scratch=[plgpu.SMEM((topk, ROWS), x.dtype) for x in out],
  )(logits, _pad(bias, COLUMNS))
  return weights[:, :count].T, experts[:, :count].T


def router_weights(logits, experts, gating, numerics):
  """See `ops.router_weights`.

  Raises:
    ValueError: as `router`.
  """
  del numerics
  count, topk = experts.shape
  _check_experts(logits)
  logits, experts = _pad(logits, ROWS, COLUMNS), _pad(experts, ROWS).T
  size = logits.shape[1]

  def kernel(logits_ref, experts_ref, weights_ref, weights):
    block = _block(lax.axis_index('rows'))
    scores = _scores(logits_ref, block, gating)
    column = lax.broadcasted_iota(jnp.int32, scores.shape, 1)

    @pl.loop(0, topk)
    def _(slot):
      expert = warpgroup.load_rows(experts_ref, slot, block)
      hit = column == warpgroup.wide(expert, size)
      weights[slot] = jnp.where(hit, scores, -jnp.inf).max(1)

    _normalise(weights, gating)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(weights, weights_ref.at[:, block])
    plgpu.wait_smem_to_gmem(0)

  weights = warpgroup.kernel(
      kernel,
      name='router_weights',
      grid=dict(rows=logits.shape[0] // ROWS),
      out=jax.ShapeDtypeStruct(experts.shape, nx.F32),
      scratch=[plgpu.SMEM((topk, ROWS), nx.F32)],
  )(logits, experts)
  return weights[:, :count].T


def _check_experts(logits) -> None:
  if logits.shape[1] > EXPERTS:
    raise ValueError(
        f"logits_TE {logits.shape}: impl='pallas' on gpu takes at most"
        f' {EXPERTS} experts'
    )


def _scores(logits_ref, block, gating):
  """Returns float32 [ROWS, E] of a block."""
  columns = pl.ds(0, logits_ref.shape[1])
  scores = warpgroup.load_tile(logits_ref, block, columns)
  return jax.nn.sigmoid(scores) if gating == 'sigmoid' else scores


def _normalise(weights, gating) -> None:
  """Turns the scores of the chosen, [topk, ROWS], into their weights."""
  slots = range(weights.shape[0])
  chosen = [warpgroup.load_rows(weights, slot) for slot in slots]
  if gating == 'softmax':
    best = functools.reduce(jnp.maximum, chosen)
    chosen = [jnp.exp(score - best) for score in chosen]
  scale = 1 / lanes.tree_add(chosen)
  for slot, score in zip(slots, chosen):
    weights[slot] = score * scale


def swiglu(gate, up, numerics):
  """See `ops.swiglu`."""
  count, width = gate.shape
  gate, up = (_pad(x, ROWS, COLUMNS) for x in (gate, up))

  def kernel(gate_ref, up_ref, y_ref, memory):
    column = lax.axis_index('columns')
    place = _block(lax.axis_index('rows')), pl.ds(column * COLUMNS, COLUMNS)
    gate, up = (warpgroup.load_tile(x, *place) for x in (gate_ref, up_ref))
    y = gate * jax.nn.sigmoid(gate) * up
    _write(numerics.cast(y), memory, y_ref, *place)

  y = warpgroup.kernel(
      kernel,
      name='swiglu',
      grid=dict(rows=gate.shape[0] // ROWS, columns=gate.shape[1] // COLUMNS),
      out=jax.ShapeDtypeStruct(gate.shape, numerics.storage),
      scratch=[plgpu.SMEM((ROWS, COLUMNS), numerics.storage)],
  )(gate, up)
  return y[:count, :width]
