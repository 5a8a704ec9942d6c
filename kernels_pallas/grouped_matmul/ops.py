"""Mixture-of-experts product: slots sorted by expert, row tiles, no drops.

A slot is one of the `topk` choices of one token. `plan` sorts the slots by
expert and pads every expert's group to whole tiles; `dispatch` brings the rows
there, `grouped_matmul` multiplies every tile by its expert's matrix, `combine`
adds a token's slots in slot order. No scatter-add takes part, so a token's
result does not depend on its neighbours.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import numerics as nx
from kernels_pallas.grouped_matmul import pallas_gpu
from kernels_pallas.grouped_matmul import pallas_tpu
from kernels_pallas.grouped_matmul import reference
from kernels_pallas.grouped_matmul import xla

# Rows of one tile; all rows of a tile have one expert. See `numerics.ROW_TILE`:
# 48 is a multiple of six and of eight.
GROUP_TILE = 48
GPU_GROUP_TILE = 64  # the height of an instruction
# On TPU: fewer than 128 rows take the MXU as long, 256 make better use of it.
TPU_GROUP_TILES = (128, 256)

IMPLS = {
    'pallas': {'tpu': pallas_tpu.Grouped, 'gpu': pallas_gpu.Grouped},
    'xla': xla.Grouped,
    'reference': reference.Grouped,
}


class Plan(NamedTuple):
  """Where each slot goes. R rows = tiles x tile height, padding included.

  Attributes:
    row_of_slot_Tk: int32 [T, topk], the sorted row of each slot, R or more for
      one that goes nowhere.
    slot_of_row_R: int32 [R], flat slot index t·topk + j, or T·topk if padding.
    expert_of_tile: int32 [tiles], ascending, the expert of each tile; E for the
      last tiles, which hold no slot.
  """

  row_of_slot_Tk: jax.Array
  slot_of_row_R: jax.Array
  expert_of_tile: jax.Array


def group_tile(slots: int, num_experts: int) -> int:
  """Returns the height of a tile on this platform.

  A row's result does not depend on the height on TPU, where it follows the mean
  number of rows of an expert; elsewhere it may.

  Args:
    slots: T·topk.
    num_experts: E.
  """
  if nx.platform() != 'tpu':
    return GPU_GROUP_TILE if nx.platform() == 'gpu' else GROUP_TILE
  low, high = TPU_GROUP_TILES
  return high if slots >= high * num_experts else low


def plan(experts_Tk, num_experts: int, tile: int | None = None) -> Plan:
  """Sorts slots by expert (stable) and pads every group to whole tiles.

  Args:
    experts_Tk: int32 [T, topk], values in 0..num_experts-1, or num_experts for
      a slot that goes nowhere.
    num_experts: E.
    tile: rows of a tile, a multiple of 16; None for `group_tile`.

  Returns:
    The plan; its number of tiles depends on shapes only.

  Raises:
    ValueError: if the experts are not [T, topk], num_experts < 1 or the tile is
      no multiple of 16.
  """
  if experts_Tk.ndim != 2:
    raise ValueError(f'experts_Tk {experts_Tk.shape}: expected [T, topk]')
  if num_experts < 1:
    raise ValueError(f'num_experts={num_experts}: at least 1 is needed')
  flat = experts_Tk.reshape(-1)
  slots = flat.size
  if tile is None:
    tile = group_tile(slots, num_experts)
  if tile < 1 or tile % 16:
    raise ValueError(f'tile={tile}: a multiple of 16 is needed')
  tiles = (slots - 1) // tile + num_experts
  order = jnp.argsort(flat, stable=True)
  sizes = (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32).sum(0)
  start = jnp.cumsum(sizes) - sizes
  padded = -(-sizes // tile) * tile
  end = jnp.cumsum(padded)
  row_start = end - padded
  sorted_expert = flat[order]
  rank = jnp.arange(slots) - start[sorted_expert]
  rows = tiles * tile
  row_sorted = jnp.where(
      sorted_expert < num_experts,
      row_start[sorted_expert] + rank,
      rows + jnp.arange(slots),
  )
  row = (
      jnp.zeros(slots, jnp.int32).at[order].set(row_sorted, unique_indices=True)
  )
  slot = jnp.full(rows, slots, jnp.int32)
  slot = slot.at[row_sorted].set(
      order.astype(jnp.int32), mode='drop', unique_indices=True
  )
  first = jnp.arange(tiles) * tile
  expert = (first[:, None] >= end).astype(jnp.int32).sum(-1)
  return Plan(row.reshape(experts_Tk.shape), slot, expert)


@jax.custom_vjp
def dispatch(x_TD, plan_: Plan):
  """Brings each token's row to its slots.

  Args:
    x_TD: [T, D].
    plan_: from `plan`.

  Returns:
    [R, D], zero in padding rows.
  """
  topk = plan_.row_of_slot_Tk.shape[1]
  return _rows(x_TD, plan_.slot_of_row_R // topk)


def _rows(x, index):
  return x.at[index].get(mode='fill', fill_value=0)


def _dispatch_backward(plan_, g):
  g_TkD = _rows(g, plan_.row_of_slot_Tk)
  return sum(g_TkD[:, j] for j in range(g_TkD.shape[1])), None


dispatch.defvjp(lambda x, p: (dispatch(x, p), p), _dispatch_backward)


@jax.custom_vjp
def slots(y_RD, plan_: Plan):
  """Brings rows back to their slots.

  Args:
    y_RD: [R, D].
    plan_: from `plan`.

  Returns:
    [T, topk, D], zero in slots that went nowhere.
  """
  return _rows(y_RD, plan_.row_of_slot_Tk)


def _slots_backward(plan_, g_TkD):
  flat = g_TkD.reshape(-1, g_TkD.shape[-1])
  return _rows(flat, plan_.slot_of_row_R), None


slots.defvjp(lambda y, p: (slots(y, p), p), _slots_backward)


def combine(y_RD, weights_Tk, plan_: Plan, *, numerics: nx.Numerics):
  """out_t = Σ_j w_tj · y_row(t,j), added in slot order j = 0, 1, ...

  Args:
    y_RD: [R, D], expert outputs.
    weights_Tk: float32 [T, topk].
    plan_: from `plan`.
    numerics: rounding rules.

  Returns:
    float32 [T, D]; the caller rounds.

  Raises:
    ValueError: on shapes that do not fit.
  """
  shape, rows = plan_.row_of_slot_Tk.shape, plan_.slot_of_row_R.shape
  if weights_Tk.shape != shape or y_RD.shape[:1] != rows:
    raise ValueError(
        f'y_RD {y_RD.shape} and weights_Tk {weights_Tk.shape}: the plan needs'
        f' [{rows[0]}, D] and {shape}'
    )
  return combine_slots(slots(y_RD, plan_), weights_Tk, numerics=numerics)


def combine_slots(y_TkD, weights_Tk, *, numerics: nx.Numerics):
  """`combine` of rows that are back in their slots, [T, topk, D]."""
  parts = numerics.keep(y_TkD.astype(nx.F32) * weights_Tk[..., None])
  total = parts[:, 0]
  for j in range(1, parts.shape[1]):
    total = total + parts[:, j]
  return total


def check_shapes(x_RD, w_EDF, plan_: Plan) -> None:
  """Raises ValueError unless rows, matrices and plan fit each other."""
  rows = plan_.slot_of_row_R.shape[0]
  if w_EDF.ndim != 3:
    raise ValueError(f'w_EDF {w_EDF.shape}: expected [E, D, F]')
  if x_RD.shape != (rows, w_EDF.shape[1]):
    raise ValueError(
        f'x_RD {x_RD.shape}: the plan and w_EDF {w_EDF.shape} need'
        f' {(rows, w_EDF.shape[1])}'
    )


def grouped_matmul(
    x_RD, w_EDF, plan_: Plan, *, numerics: nx.Numerics, impl: str = 'auto'
):
  """y_r = x_r W_expert(r), a tile of rows at a time.

  The gradient is taken of the rounded product: its cotangent is rounded to
  `numerics.dtype`, which changes nothing where the caller rounds the result.

  Args:
    x_RD: [R, D] from `dispatch`.
    w_EDF: [E, D, F].
    plan_: from `plan`.
    numerics: rounding and summation rules.
    impl: 'auto', 'pallas', 'xla' or 'reference'.

  Returns:
    float32 [R, F], zero in tiles without a slot; the caller rounds.

  Raises:
    ValueError: on shapes that do not fit, or that 'pallas' does not take.
  """
  check_shapes(x_RD, w_EDF, plan_)
  fun = nx.choose(impl, IMPLS, 'grouped_matmul')
  return _grouped(x_RD, w_EDF, plan_.expert_of_tile, fun, numerics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x, w, expert, fun, numerics):
  return fun.forward(x, w, expert, numerics)


def _grouped_forward(x, w, expert, fun, numerics):
  return fun.forward(x, w, expert, numerics), (x, w, expert)


def _grouped_backward(fun, numerics, saved, g):
  x, w, expert = saved
  g = numerics.cast(g)
  dx = fun.backward_rows(g, w, expert, numerics)
  dw = fun.backward_weights(x, g, expert, w.shape[0], numerics)
  return dx.astype(x.dtype), dw.astype(w.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)
