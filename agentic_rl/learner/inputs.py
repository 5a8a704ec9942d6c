"""What the learner's programs read: a microbatch as flat arrays.

`tokens`, `targets`, `weights`, `advantages`, `logp_behavior`, `sampled` and
`real` are [T] over the stream of all rows, `routes` [T, L_moe, topk] and
`support` [T, k] too, where they were recorded; `positions_BT` keeps the rows,
whole ones. Log-probs are taken at the places `rows` [R] only, those that were
drawn or train; free entries hold T. `sequence` [R] numbers the sequences of
these places: equal numbers are neighbours, free entries have one of their own.
"""

from __future__ import annotations

import math

import numpy as np

from agentic_rl import types
from agentic_rl.parallel import mesh
from agentic_rl.policy import routing
from kernels_pallas import numerics as nx


def flatten(
    batch: types.Batch, parallel: mesh.Parallel = mesh.SINGLE
) -> dict[str, np.ndarray]:
  """Returns the inputs of a microbatch, see the module.

  On a mesh every device has its own rows, and its own part of them; its inputs
  are an entry of a first axis. The parts of a row number its sequences alike.

  Args:
    batch: one of `pack.microbatches`.
    parallel: the mesh; it must cut the rows evenly.
  """
  shards, parts = parallel.size(*mesh.ROW_AXES), parallel.size('context')
  blocks = [
      _block(batch, (i, shards), (j, parts))
      for i in range(shards)
      for j in range(parts)
  ]
  size = blocks[0]['tokens'].size
  longest = max(len(b['rows']) for b in blocks)
  # Two sizes only, so that two programs serve every batch.
  half = -(-size // 2 // nx.ROW_TILE) * nx.ROW_TILE
  room = half if longest <= half else size
  for block in blocks:
    found = len(block['rows'])
    for name, rest in (('rows', size), ('sequence', size * parts)):
      whole = np.full(room, rest, np.int32)
      whole[:found] = block[name]
      block[name] = whole
  if parallel.mesh is None:
    return blocks[0]
  return {k: np.stack([b[k] for b in blocks]) for k in blocks[0]}


def mesh_rows(rows: int, row_tokens: int, parallel: mesh.Parallel) -> int:
  """Returns the next number of rows that gives devices whole row tiles.

  Args:
    rows: wanted in a microbatch.
    row_tokens: tokens of a row.
    parallel: the mesh, which divides a row's tokens.
  """
  part_tokens = row_tokens // parallel.size('context')
  shards = parallel.size(*mesh.ROW_AXES)
  tile = nx.ROW_TILE // math.gcd(part_tokens, nx.ROW_TILE)
  return -(-rows // (shards * tile)) * shards * tile


def _block(
    batch: types.Batch, row: tuple[int, int], part: tuple[int, int]
) -> dict[str, np.ndarray]:
  """Returns the inputs of block `row` (i of n) and part (j of m) of the rows."""
  count, length = (
      size // n for size, (_, n) in zip(batch.tokens_BT.shape, (row, part))
  )
  mine = slice(row[0] * count, (row[0] + 1) * count)
  span = slice(part[0] * length, (part[0] + 1) * length)
  fields = {
      'tokens': batch.tokens_BT,
      'targets': batch.targets_BT,
      'weights': batch.weights_BT,
      'advantages': batch.advantages_BT,
      'logp_behavior': batch.logp_behavior_BT,
      'sampled': batch.sampled_BT,
      'real': batch.segments_BT >= 0,
      'routes': batch.routes_BTLk,
      'support': batch.support_BTk,
  }
  out = {}
  for name, value in fields.items():
    if value is not None:
      own = value[mine, span]
      # Not -1: routes without layers have no size to tell it from.
      own = own.reshape(count * length, *own.shape[2:])
      out[name] = np.ascontiguousarray(own)
  if 'routes' in out:
    out |= routing.split(out['routes'])
  out['positions_BT'] = batch.positions_BT[mine]
  out['rows'] = np.flatnonzero((out['weights'] > 0) | out['sampled'])
  numbers = _sequences(batch.segments_BT[mine])[:, span]
  out['sequence'] = numbers.reshape(-1)[out['rows']]
  return out


def _sequences(segments_BT) -> np.ndarray:
  """Numbers the sequences of all rows, int [B, T], from 0 below B · T."""
  first = np.ones(segments_BT.shape, bool)
  first[:, 1:] = np.diff(segments_BT, axis=1) != 0
  return np.cumsum(first).reshape(first.shape) - 1
