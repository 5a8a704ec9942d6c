"""Log-prob head as TPU kernels: row tiles x vocabulary tiles, none kept.

A tile of logits lives in VMEM only: its maximum, sums and target are folded
into one column a row, and its noise, for sampling, is hashed on the spot. The
backward pass computes the logits again, once by rows for dx and once by columns
for dw.

All products of rows and head have one height, so sampler and learner share their
bits; a block of the learner's rows has several, while a tile of the head stays.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import random as prng

from kernels_pallas import lanes
from kernels_pallas import numerics as nx

VOCAB_TILE = 512
ROWS = nx.ROW_TILE  # height of every product of the forward
BACKWARD_ROWS = 256  # of the backward: it also contracts over rows
BLOCK_ROWS = 1024  # that stay while the head streams past, at most
BLOCK_BYTES = 4 << 20  # of them, in float32
COLUMNS_BYTES = 8 << 20  # of columns of dw, where the sums over rows stay
WIDTH_BYTES = 16 << 10  # of a row, at most
UNROLL = 8  # row tiles of the forward that the compiler sees together, at most
VMEM_BYTES = 56 << 20

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))


def _block_rows(x_TD, w_DV, tile=ROWS) -> int:
  """Rows of a block: some whole tiles, so that the head is read less often.

  Raises:
    ValueError: if rows are too wide, or of another dtype than the head.
  """
  if x_TD.dtype != w_DV.dtype:
    raise ValueError(
        f"x_TD {x_TD.dtype} and w_DV {w_DV.dtype}: impl='pallas' needs one"
        ' dtype'
    )
  if x_TD.shape[1] * x_TD.dtype.itemsize > WIDTH_BYTES:
    raise ValueError(
        f"x_TD {x_TD.shape}, {x_TD.dtype}: impl='pallas' takes a width of at"
        f' most {WIDTH_BYTES // x_TD.dtype.itemsize}'
    )
  tiles = pl.cdiv(x_TD.shape[0], tile)
  fit = min(BLOCK_ROWS, BLOCK_BYTES // (4 * x_TD.shape[1])) // tile
  blocks = pl.cdiv(tiles, max(fit, 1))
  return pl.cdiv(tiles, blocks) * tile


def _call(kernel, grid, in_specs, out_specs, out_shape, scratch, name):
  return pl.pallas_call(
      kernel,
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      out_shape=out_shape,
      scratch_shapes=scratch,
      interpret=nx.interpret(),
      name=name,
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'arbitrary'),
          vmem_limit_bytes=VMEM_BYTES,
      ),
  )


def _for_tiles(block, run, tile=ROWS, unroll=UNROLL):
  """Calls run(slice) for each row tile of a block."""
  tiles = block // tile
  together = max(n for n in range(1, unroll + 1) if tiles % n == 0)

  def step(i, carry):
    for j in range(together):
      start = pl.multiple_of((i * together + j) * tile, tile)
      run(pl.ds(start, tile))
    return carry

  lax.fori_loop(0, tiles // together, step, 0)


def _logits(rows, w, temperature, numerics):
  z = numerics.keep(numerics.dot(rows, w, _ROWS_BY_COLUMNS))
  return numerics.keep(z * (1 / temperature))


def _columns(tile, w_ref, rows=ROWS):
  """Token ids of the columns of a vocabulary tile, int32 [rows, n]."""
  size = w_ref.shape[1]
  return tile * size + lax.broadcasted_iota(jnp.int32, (rows, size), 1)


def _inside(x, columns, vocab, fill):
  """Replaces what lies behind the vocabulary: it may be anything, also NaN."""
  whole = vocab % columns.shape[1] == 0
  return x if whole else jnp.where(columns < vocab, x, fill)


def _columns_spec(rows):
  return pl.BlockSpec((rows, 1), lambda i, j: (i, 0))


# Log-probs.


def _logprobs_kernel(
    x_ref,
    w_ref,
    targets_ref,
    logp_ref,
    entropy_ref,
    lse_ref,
    mean_ref,
    m_ref,
    l_ref,
    u_ref,
    chosen_ref,
    *,
    vocab,
    temperature,
    numerics,
):
  keep, tile = numerics.keep, pl.program_id(1)

  @pl.when(tile == 0)
  def _():
    m_ref[...] = jnp.full(m_ref.shape, -1e30, nx.F32)
    l_ref[...] = jnp.zeros(l_ref.shape, nx.F32)
    u_ref[...] = jnp.zeros(u_ref.shape, nx.F32)
    chosen_ref[...] = jnp.full(chosen_ref.shape, -jnp.inf, nx.F32)

  columns = _columns(tile, w_ref)

  def run(rows):
    z = _logits(x_ref[rows, :], w_ref[...], temperature, numerics)
    z = _inside(z, columns, vocab, -jnp.inf)
    hit = columns == targets_ref[rows, :]
    best = jnp.max(jnp.where(hit, z, -jnp.inf), -1, keepdims=True)
    chosen_ref[rows, :] = jnp.maximum(chosen_ref[rows, :], best)
    old = m_ref[rows, :]
    m = jnp.maximum(old, jnp.max(z, -1, keepdims=True))
    a = keep(jnp.exp(old - m))
    p = keep(jnp.exp(z - m))
    pz = _inside(keep(p * z), columns, vocab, 0)
    # Sums stay spread over the lanes until the last tile.
    l_ref[rows, :] = keep(l_ref[rows, :] * a) + lanes.fold(p)
    u_ref[rows, :] = keep(u_ref[rows, :] * a) + lanes.fold(pz)
    m_ref[rows, :] = m

  _for_tiles(x_ref.shape[0], run)

  @pl.when(tile == pl.num_programs(1) - 1)
  def _():
    l = lanes.column(lanes.row_sums(l_ref[...], numerics))
    u = lanes.column(lanes.row_sums(u_ref[...], numerics))
    lse = m_ref[...] + keep(jnp.log(l))
    mean = keep(u * (1 / l))
    logp_ref[...] = chosen_ref[...] - lse
    entropy_ref[...] = lse - mean
    lse_ref[...] = lse
    mean_ref[...] = mean


def forward(x_TD, w_DV, targets_T, temperature, numerics):
  """Returns log-probs, entropies, and log Σ exp z and Σ p z for `backward`.

  Args:
    x_TD: [T, D].
    w_DV: [D, V].
    targets_T: int32 [T].
    temperature: > 0.
    numerics: rounding and summation rules.

  Returns:
    Four float32 [T].
  """
  count, width = x_TD.shape
  vocab = w_DV.shape[1]
  block = _block_rows(x_TD, w_DV)
  column = _columns_spec(block)
  spread = pltpu.VMEM((block, lanes.LANES), nx.F32)
  single = pltpu.VMEM((block, 1), nx.F32)
  out = _call(
      functools.partial(
          _logprobs_kernel,
          vocab=vocab,
          temperature=temperature,
          numerics=numerics,
      ),
      (pl.cdiv(count, block), pl.cdiv(vocab, VOCAB_TILE)),
      [
          pl.BlockSpec((block, width), lambda i, j: (i, 0)),
          pl.BlockSpec((width, VOCAB_TILE), lambda i, j: (0, j)),
          column,
      ],
      [column] * 4,
      [jax.ShapeDtypeStruct((count, 1), nx.F32)] * 4,
      [single, spread, spread, single],
      'logprobs',
  )(x_TD, w_DV, targets_T[:, None])
  return tuple(a[:, 0] for a in out)


def logprobs(x_TD, w_DV, targets_T, temperature, numerics):
  """See `ops.logprobs`."""
  return forward(x_TD, w_DV, targets_T, temperature, numerics)[:2]


# Sampling.


def _logits_kernel(x_ref, w_ref, z_ref, *, temperature, numerics):
  def run(rows):
    z_ref[rows, :] = _logits(x_ref[rows, :], w_ref[...], temperature, numerics)

  _for_tiles(x_ref.shape[0], run)


def logits(x_TD, w_DV, temperature, numerics):
  """Returns float32 [T, V], for sampling from a narrowed support."""
  (count, width), vocab = x_TD.shape, w_DV.shape[1]
  block = _block_rows(x_TD, w_DV)
  return _call(
      functools.partial(
          _logits_kernel, temperature=temperature, numerics=numerics
      ),
      (pl.cdiv(count, block), pl.cdiv(vocab, VOCAB_TILE)),
      [
          pl.BlockSpec((block, width), lambda i, j: (i, 0)),
          pl.BlockSpec((width, VOCAB_TILE), lambda i, j: (0, j)),
      ],
      pl.BlockSpec((block, VOCAB_TILE), lambda i, j: (i, j)),
      jax.ShapeDtypeStruct((count, vocab), nx.F32),
      [],
      'logits',
  )(x_TD, w_DV)


def _gumbel(keys, columns):
  """`jax.random.gumbel` of the row's key, at some of its places.

  Args:
    keys: uint32 [ROWS, 2].
    columns: int32 [ROWS, n], the places.

  Returns:
    float32 [ROWS, n].
  """
  count = columns.astype(jnp.uint32)
  first, second = (
      jnp.broadcast_to(keys[:, i : i + 1], count.shape) for i in range(2)
  )
  bits = prng.threefry2x32_p.bind(first, second, jnp.zeros_like(count), count)
  # 23 bits behind a one are a float in [1, 2).
  bits = lax.shift_right_logical(bits[0] ^ bits[1], jnp.uint32(9))
  one = jnp.uint32(0x3F800000)
  uniform = lax.bitcast_convert_type(bits | one, nx.F32) - 1
  uniform = jnp.maximum(uniform, np.finfo(np.float32).tiny)
  return -jnp.log(-jnp.log(uniform))


def _draw_kernel(
    x_ref,
    w_ref,
    keys_ref,
    noise_ref,
    tokens_ref,
    best_ref,
    token_ref,
    *,
    vocab,
    temperature,
    greedy,
    numerics,
):
  tile = pl.program_id(1)

  @pl.when(tile == 0)
  def _():
    best_ref[...] = jnp.full(best_ref.shape, -jnp.inf, nx.F32)
    token_ref[...] = jnp.zeros(token_ref.shape, jnp.int32)

  columns = _columns(tile, w_ref)

  def run(rows):
    z = _logits(x_ref[rows, :], w_ref[...], temperature, numerics)
    if not greedy:
      noise = _gumbel(keys_ref[rows, :], columns) * noise_ref[0, 0]
      z = z + numerics.keep(noise)
    z = _inside(z, columns, vocab, -jnp.inf)
    best = jnp.max(z, -1, keepdims=True)
    token = jnp.where(z == best, columns, vocab - 1)
    token = jnp.min(token, -1, keepdims=True)
    better = best > best_ref[rows, :]  # the earlier one stays among equals
    token_ref[rows, :] = jnp.where(better, token, token_ref[rows, :])
    best_ref[rows, :] = jnp.where(better, best, best_ref[rows, :])

  _for_tiles(x_ref.shape[0], run)

  @pl.when(tile == pl.num_programs(1) - 1)
  def _():
    tokens_ref[...] = token_ref[...]


def check_keys(keys_T) -> None:
  """Raises ValueError unless `_gumbel` makes the noise of these keys."""
  kind = str(jax.random.key_impl(keys_T))
  if kind != 'threefry2x32' or not jax.config.jax_threefry_partitionable:
    raise ValueError(
        f'keys_T of {kind}, jax_threefry_partitionable='
        f"{jax.config.jax_threefry_partitionable}: impl='pallas' draws with"
        ' partitionable threefry2x32 keys'
    )


def draw(x_TD, w_DV, keys_T, temperature, noise, greedy, numerics):
  """Draws from the whole vocabulary; [T, V] is never built.

  The noise at place v of a row is the hash of its key and v, as in
  `jax.random.gumbel`, so each tile makes its own.

  Args:
    x_TD: [T, D].
    w_DV: [D, V].
    keys_T: PRNG keys [T] of threefry2x32.
    temperature: > 0, divisor of the logits.
    noise: factor of the noise.
    greedy: whether to leave the noise out.
    numerics: rounding and summation rules.

  Returns:
    int32 [T].

  Raises:
    ValueError: on another kind of keys or of noise, as set in `jax.config`.
  """
  check_keys(keys_T)
  (count, width), vocab = x_TD.shape, w_DV.shape[1]
  block = _block_rows(x_TD, w_DV)
  tokens = _call(
      functools.partial(
          _draw_kernel,
          vocab=vocab,
          temperature=temperature,
          greedy=greedy,
          numerics=numerics,
      ),
      (pl.cdiv(count, block), pl.cdiv(vocab, VOCAB_TILE)),
      [
          pl.BlockSpec((block, width), lambda i, j: (i, 0)),
          pl.BlockSpec((width, VOCAB_TILE), lambda i, j: (0, j)),
          pl.BlockSpec((block, 2), lambda i, j: (i, 0)),
          pl.BlockSpec(memory_space=pltpu.SMEM),
      ],
      _columns_spec(block),
      jax.ShapeDtypeStruct((count, 1), jnp.int32),
      [pltpu.VMEM((block, 1), nx.F32), pltpu.VMEM((block, 1), jnp.int32)],
      'draw',
  )(
      x_TD,
      w_DV,
      jax.random.key_data(keys_T),
      jnp.asarray(noise, nx.F32).reshape(1, 1),
  )
  return tokens[:, 0]


# Backward. Gradients take no part in the promise of equal bits.


def _dz(z, columns, facts, vocab, temperature):
  """∂/∂(x w): g (onehot(y) - p) - h p (z - Σ p z), over the temperature."""
  targets, lse, mean, g_logp, g_entropy = facts
  p = jnp.exp(z - lse)
  hit = jnp.where(columns == targets, 1.0, 0.0)
  dz = g_logp * (hit - p) - g_entropy * p * (z - mean)
  return _inside(dz * (1 / temperature), columns, vocab, 0)


def _dot(dz, other, dims, numerics, flip=False):
  """A product with float32 dz, which bfloat16 partners meet in two parts."""
  parts = [dz]
  if other.dtype == jnp.bfloat16:
    high = dz.astype(jnp.bfloat16)
    parts = [high, (dz - high.astype(nx.F32)).astype(jnp.bfloat16)]
  pair = lambda p: (other, p) if flip else (p, other)
  products = [numerics.dot(*pair(p), dims) for p in parts]
  return sum(products[1:], products[0])


def _dx_kernel(x_ref, w_ref, *refs, vocab, temperature, numerics):
  *facts, dx_ref, sum_ref = refs
  tile = pl.program_id(1)

  @pl.when(tile == 0)
  def _():
    sum_ref[...] = jnp.zeros(sum_ref.shape, nx.F32)

  columns = _columns(tile, w_ref, BACKWARD_ROWS)
  w = _inside(w_ref[...], columns[:1], vocab, 0)

  def run(rows):
    z = _logits(x_ref[rows, :], w, temperature, numerics)
    facts_here = [ref[rows, :] for ref in facts]
    dz = _dz(z, columns, facts_here, vocab, temperature)
    sum_ref[rows, :] += _dot(dz, w, _ROWS_BY_ROWS, numerics)

  _for_tiles(x_ref.shape[0], run, BACKWARD_ROWS, 1)

  @pl.when(tile == pl.num_programs(1) - 1)
  def _():
    dx_ref[...] = sum_ref[...].astype(dx_ref.dtype)


def _dw_kernel(x_ref, w_ref, *refs, count, vocab, temperature, numerics):
  *facts, dw_ref, sum_ref = refs
  tile, chunk = pl.program_id(0), pl.program_id(1)
  block = x_ref.shape[0]

  @pl.when(chunk == 0)
  def _():
    sum_ref[...] = jnp.zeros(sum_ref.shape, nx.F32)

  columns = _columns(tile, w_ref, BACKWARD_ROWS)

  def run(rows):
    x = x_ref[rows, :]
    facts_here = [ref[rows, :] for ref in facts]
    z = _logits(x, w_ref[...], temperature, numerics)
    dz = _dz(z, columns, facts_here, vocab, temperature)
    if count % block:  # rows behind the last one may hold NaN
      row = chunk * block + rows.start
      row += lax.broadcasted_iota(jnp.int32, (BACKWARD_ROWS, 1), 0)
      x = jnp.where(row < count, x, 0)
      dz = jnp.where(row < count, dz, 0)
    sum_ref[...] += _dot(dz, x, _COLUMNS_BY_COLUMNS, numerics, flip=True)

  _for_tiles(block, run, BACKWARD_ROWS, 1)

  @pl.when(chunk == pl.num_programs(1) - 1)
  def _():
    dw_ref[...] = sum_ref[...].astype(dw_ref.dtype)


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
  """Returns dx [T, D] and dw [D, V], a tile of logits at a time.

  ∂log p/∂z = onehot(y) - p;  ∂H/∂z = -p (z - Σ p z).

  Args:
    x_TD: [T, D].
    w_DV: [D, V].
    targets_T: int32 [T].
    lse_T: log Σ exp z, from `forward`.
    mean_T: Σ p z, from `forward`.
    g_logp: float32 [T].
    g_entropy: float32 [T].
    temperature: > 0.
    numerics: rounding and summation rules.
  """
  (count, width), vocab = x_TD.shape, w_DV.shape[1]
  block = _block_rows(x_TD, w_DV, BACKWARD_ROWS)
  size = VOCAB_TILE
  while size > lanes.LANES and size * width * 4 > COLUMNS_BYTES:
    size //= 2
  chunks, tiles = pl.cdiv(count, block), pl.cdiv(vocab, size)
  facts = [targets_T, lse_T, mean_T, g_logp, g_entropy]
  facts = [a[:, None] for a in facts]
  options = dict(vocab=vocab, temperature=temperature, numerics=numerics)
  rows = pl.BlockSpec((block, width), lambda i, j: (i, 0))
  dx = _call(
      functools.partial(_dx_kernel, **options),
      (chunks, tiles),
      [
          rows,
          pl.BlockSpec((width, size), lambda i, j: (0, j)),
          *[_columns_spec(block)] * len(facts),
      ],
      rows,
      jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype),
      [pltpu.VMEM((block, width), nx.F32)],
      'logprobs_dx',
  )(x_TD, w_DV, *facts)
  columns = pl.BlockSpec((width, size), lambda i, j: (0, i))
  dw = _call(
      functools.partial(_dw_kernel, count=count, **options),
      (tiles, chunks),
      [
          pl.BlockSpec((block, width), lambda i, j: (j, 0)),
          columns,
          *[pl.BlockSpec((block, 1), lambda i, j: (j, 0))] * len(facts),
      ],
      columns,
      jax.ShapeDtypeStruct(w_DV.shape, w_DV.dtype),
      [pltpu.VMEM((width, size), nx.F32)],
      'logprobs_dw',
  )(x_TD, w_DV, *facts)
  return dx, dw
