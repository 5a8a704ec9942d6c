"""Log-prob head for Hopper GPUs: row tiles x vocabulary tiles, none kept.

A block computes the logits of 64 rows for a span of the vocabulary, a tile at a
time, and keeps of each row their maximum, sums and target. What the spans of a
row give is put together by `_combine`. Tiles and spans depend on the vocabulary
alone, so a row's bits do not depend on its company.

The backward pass writes the gradient of a chunk of logits and leaves its two
products to XLA. Gradients take no part in the promise of equal bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import numerics as nx
from kernels_pallas import warpgroup
from kernels_pallas.logprob_head.pallas_tpu import check_keys
from kernels_pallas.matmul import pallas_gpu as dense

ROWS = nx.ROW_TILE
COLUMNS = 128  # of a vocabulary tile
SPAN_TILES = 8  # of a block of the forward
CHUNK = 4096  # columns whose gradients exist at once

_NONE = -1e30  # maximum of a row that saw no logit yet; finite, so never NaN

_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))


def _padded(x_TD, w_DV):
  """Returns rows and head with room for whole tiles."""
  dense.check_dtypes('x_TD and w_DV', x_TD, w_DV)
  x = dense.pad(x_TD, ROWS, dense.DEPTH_TILE)
  return x, dense.pad(w_DV, dense.DEPTH_TILE, dense.whole(COLUMNS))


def _of_rows(x_T):
  """Pads numbers of rows, as `_padded` the rows."""
  return dense.pad(x_T, ROWS)


def _logits(x_ref, w_ref, row, column, temperature):
  z = dense.product(x_ref, w_ref, row, column, ROWS, COLUMNS)
  return z if temperature == 1 else warpgroup.keep(z * (1 / temperature))


def _ids(column):
  """Returns int32 [ROWS, COLUMNS], the tokens of a tile."""
  iota = lax.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1)
  return iota + column * COLUMNS


def _wide(x):
  return warpgroup.wide(x, COLUMNS)


def _over_spans(run, start, facts, inputs, vocab, out, name):
  """Launches a kernel that folds the tiles of each span into a state.

  Args:
    run: (refs of inputs, facts, row, column, state) -> state.
    start: () -> state, a tuple of [ROWS].
    facts: (refs of inputs, rows) -> what `run` needs of them for every tile.
    inputs: arrays, the first one [T, D].
    vocab: V.
    out: dtypes of the state.
    name: of the kernel.

  Returns:
    Arrays [spans, T] of the state.
  """
  count, tiles = inputs[0].shape[0], pl.cdiv(vocab, COLUMNS)
  spans = pl.cdiv(tiles, SPAN_TILES)

  def kernel(*refs):
    refs, made = refs[: len(inputs)], refs[len(inputs) :]
    outs, memory = made[: len(out)], made[len(out) :]
    row, span = lax.axis_index('rows'), lax.axis_index('spans')
    first = span * SPAN_TILES
    rows = pl.ds(row * ROWS, ROWS)
    known = facts(refs, rows)
    state = lax.fori_loop(
        first,
        jnp.minimum(first + SPAN_TILES, tiles),
        lambda column, state: run(refs, known, row, column, state),
        start(),
    )
    for x, target, y_ref in zip(state, memory, outs):
      target[...] = x
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(target, y_ref.at[span, rows])
    plgpu.wait_smem_to_gmem(0)

  return warpgroup.kernel(
      kernel,
      name=name,
      # A span of the head is read by blocks that follow each other.
      grid=dict(spans=spans, rows=count // ROWS),
      out=[jax.ShapeDtypeStruct((spans, count), dtype) for dtype in out],
      scratch=[plgpu.SMEM((ROWS,), dtype) for dtype in out],
  )(*inputs)


# Log-probs.


def forward(x_TD, w_DV, targets_T, temperature, numerics):
  """Returns log-probs, entropies, and log Σ exp z and Σ p z for `backward`.

  Args:
    x_TD: bfloat16 [T, D].
    w_DV: bfloat16 [D, V].
    targets_T: int32 [T].
    temperature: > 0.
    numerics: rounding and summation rules.

  Returns:
    Four float32 [T].

  Raises:
    ValueError: unless rows and head are bfloat16.
  """
  count, vocab = x_TD.shape[0], w_DV.shape[1]
  keep = warpgroup.keep

  def start():
    zero = jnp.zeros(ROWS, nx.F32)
    return zero + _NONE, zero, zero, zero - jnp.inf

  def run(refs, target, row, column, state):
    m, l, u, chosen = state
    z, ids = _logits(refs[0], refs[1], row, column, temperature), _ids(column)
    inside = ids < vocab
    z = jnp.where(inside, z, -jnp.inf)
    hit = jnp.where(ids == _wide(target), z, -jnp.inf)
    m_new = jnp.maximum(m, z.max(1))
    a = jnp.exp(m - m_new)
    p = jnp.exp(z - _wide(m_new))
    pz = jnp.where(inside, keep(p * z), 0.0)
    l = keep(l * a) + warpgroup.row_sums(p)
    u = keep(u * a) + warpgroup.row_sums(pz)
    return m_new, l, u, jnp.maximum(chosen, hit.max(1))

  m, l, u, chosen = _over_spans(
      run,
      start,
      lambda refs, rows: warpgroup.load_rows(refs[2], rows),
      [*_padded(x_TD, w_DV), _of_rows(targets_T)],
      vocab,
      [nx.F32] * 4,
      'logprobs',
  )
  return tuple(x[:count] for x in _combine(m, l, u, chosen, numerics))


def _combine(m, l, u, chosen, numerics):
  """Puts the spans of each row together, [spans, T] -> `forward`'s results."""
  keep = numerics.keep
  best = m.max(0)
  a = keep(jnp.exp(m - best))
  l, u = (numerics.tree_sum(keep(x * a).T) for x in (l, u))
  lse, mean = best + keep(jnp.log(l)), keep(u * (1 / l))
  return chosen.max(0) - lse, lse - mean, lse, mean


def logprobs(x_TD, w_DV, targets_T, temperature, numerics):
  """See `ops.logprobs`."""
  return forward(x_TD, w_DV, targets_T, temperature, numerics)[:2]


# Sampling.


def logits(x_TD, w_DV, temperature, numerics):
  """Returns float32 [T, V], for sampling from a narrowed support."""
  z = numerics.keep(dense.matmul(x_TD, w_DV, numerics))
  return numerics.keep(z * (1 / temperature))


def draw(x_TD, w_DV, keys_T, temperature, noise, greedy, numerics):
  """Draws from the whole vocabulary; [T, V] is never built.

  The noise at place v of a row is the hash of its key and v, as in
  `jax.random.gumbel`, so each tile makes its own.

  Args:
    x_TD: bfloat16 [T, D].
    w_DV: bfloat16 [D, V].
    keys_T: PRNG keys [T] of threefry2x32.
    temperature: > 0, divisor of the logits.
    noise: factor of the noise.
    greedy: whether to leave the noise out.
    numerics: unused.

  Returns:
    int32 [T].

  Raises:
    ValueError: on another kind of keys or of noise, as set in `jax.config`, or
      unless rows and head are bfloat16.
  """
  del numerics
  check_keys(keys_T)
  count, vocab = x_TD.shape[0], w_DV.shape[1]

  def start():
    return jnp.full(ROWS, -jnp.inf, nx.F32), jnp.zeros(ROWS, jnp.int32)

  def facts(refs, rows):
    keys = [_wide(warpgroup.load_rows(x, rows)) for x in refs[2:4]]
    return keys, refs[4][0]

  def run(refs, facts, row, column, state):
    best, token = state
    keys, factor = facts
    z, ids = _logits(refs[0], refs[1], row, column, temperature), _ids(column)
    if not greedy:
      z = z + warpgroup.keep(_gumbel(keys, ids) * factor)
    z = jnp.where(ids < vocab, z, -jnp.inf)
    high = z.max(1)
    first = jnp.where(z == _wide(high), ids, vocab - 1).min(1)
    better = high > best  # the earlier one stays among equals
    return jnp.where(better, high, best), jnp.where(better, first, token)

  keys = jax.random.key_data(keys_T)
  best, token = _over_spans(
      run,
      start,
      facts,
      [
          *_padded(x_TD, w_DV),
          _of_rows(keys[:, 0]),
          _of_rows(keys[:, 1]),
          jnp.asarray(noise, nx.F32).reshape(1),
      ],
      vocab,
      [nx.F32, jnp.int32],
      'draw',
  )
  span = jnp.argmax(best, 0)[None]  # the first of equals
  return jnp.take_along_axis(token, span, 0)[0, :count]


def _gumbel(keys, ids):
  """`jax.random.gumbel` of the row's key, at some of its places.

  Args:
    keys: two uint32 [ROWS, COLUMNS].
    ids: int32 [ROWS, COLUMNS], the places.

  Returns:
    float32 [ROWS, COLUMNS].
  """
  high, low = _threefry(keys[0], keys[1], ids.astype(jnp.uint32))
  # 23 bits behind a one are a float in [1, 2).
  bits = lax.shift_right_logical(high ^ low, jnp.uint32(9))
  uniform = lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), nx.F32) - 1
  uniform = jnp.maximum(uniform, np.finfo(np.float32).tiny)
  return -jnp.log(-jnp.log(uniform))


def _threefry(first, second, count):
  """Hashes (0, count) by threefry2x32. Source: doi:10.1145/2063384.2063405.

  Args:
    first: uint32, of the key.
    second: uint32, of the key.
    count: uint32.

  Returns:
    Two uint32 arrays.
  """
  keys = first, second, first ^ second ^ jnp.uint32(0x1BD11BDA)
  x, y = first, count + second
  for i in range(5):
    for by in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
      x = x + y
      left = lax.shift_left(y, jnp.uint32(by))
      y = left | lax.shift_right_logical(y, jnp.uint32(32 - by))
      y = y ^ x
    x = x + keys[(i + 1) % 3]
    y = y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
  return x, y


# Backward.


def backward(
    x_TD,
    w_DV,
    targets_T,
    lse_T,
    mean_T,
    g_logp,
    g_entropy,
    temperature,
    numerics,
):
  """Returns dx [T, D] and dw [D, V], a chunk of the vocabulary at a time.

  ∂log p/∂z = onehot(y) - p;  ∂H/∂z = -p (z - Σ p z).

  Args:
    x_TD: bfloat16 [T, D].
    w_DV: bfloat16 [D, V].
    targets_T: int32 [T].
    lse_T: log Σ exp z, from `forward`.
    mean_T: Σ p z, from `forward`.
    g_logp: float32 [T].
    g_entropy: float32 [T].
    temperature: > 0.
    numerics: rounding and summation rules.
  """
  (count, width), vocab = x_TD.shape, w_DV.shape[1]
  size = min(CHUNK, dense.whole(COLUMNS) * pl.cdiv(vocab, COLUMNS))
  x, w = dense.pad(x_TD, ROWS, 1), dense.pad(w_DV, size)
  facts = [_of_rows(a) for a in (targets_T, lse_T, mean_T, g_logp, g_entropy)]

  def chunk(dx, begin):
    part = lax.dynamic_slice_in_dim(w, begin, size, 1)
    mine = facts[0] - begin
    dz = _dz(x, part, [mine, *facts[1:]], vocab - begin, temperature)
    # The parts of bfloat16 that add up to it; a cast could be simplified away.
    high = lax.reduce_precision(dz, 8, 7)
    parts = [a.astype(jnp.bfloat16) for a in (high, dz - high)]
    dx += sum(numerics.dot(a, part, _ROWS_BY_ROWS) for a in parts)
    dw = sum(numerics.dot(a, x, _COLUMNS_BY_COLUMNS) for a in parts)
    return dx, dw.astype(w_DV.dtype)

  dx, dw = lax.scan(
      chunk,
      jnp.zeros((x.shape[0], width), nx.F32),
      jnp.arange(0, w.shape[1], size),
  )
  return dx[:count], dw.reshape(-1, width)[:vocab].T


def _dz(x, w, facts, vocab, temperature):
  """Returns ∂/∂(x w), float32 [T, columns]; zero from column `vocab` on."""
  (count, _), columns = x.shape, w.shape[1]
  x, w = _padded(x, w)

  def kernel(x_ref, w_ref, vocab_ref, *refs):
    *facts, dz_ref, memory = refs
    row, column = lax.axis_index('rows'), lax.axis_index('columns')
    rows = pl.ds(row * ROWS, ROWS)
    target, lse, mean, g_logp, g_entropy = (
        _wide(warpgroup.load_rows(a, rows)) for a in facts
    )
    z, ids = _logits(x_ref, w_ref, row, column, temperature), _ids(column)
    p = jnp.exp(z - lse)
    hit = jnp.where(ids == target, 1.0, 0.0)
    dz = g_logp * (hit - p) - g_entropy * p * (z - mean)
    dz = jnp.where(ids < vocab_ref[0], dz * (1 / temperature), 0.0)
    dense.write(dz, dz_ref, memory, row, column)

  return warpgroup.kernel(
      kernel,
      name='logprobs_backward',
      grid=dict(columns=pl.cdiv(columns, COLUMNS), rows=count // ROWS),
      out=jax.ShapeDtypeStruct((count, w.shape[1]), nx.F32),
      scratch=[dense.store_memory(ROWS)],
  )(x, w, jnp.asarray(vocab, jnp.int32).reshape(1), *facts)[:, :columns]
