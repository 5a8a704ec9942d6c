"""Programs for `kernel_bench`: our kernels and JAX's own on the same work.

Each function is a builder for `tpu_cost.measure`: it returns a program, the
shapes of its arguments, and for its kernels what their listings do not say
because it depends on data: trips of loops (`loops`), runs of regions
(`regions`) and sizes of the grid (`scalars`), computed here from the work. A
kernel that gains or loses such a part stops the measurement with a list of what
it has, instead of a wrong number; regions that are not stated count as run.

The work: T = 2048 tokens in one packed row, N = 16 query heads, K = 4 KV heads,
H = 128; 32768 tokens of which each KV head of a token selects 16 past pages of
128; decode of 64 sequences at 2048 tokens; 2048 rows of 1024 for 8 experts;
a vocabulary of 32768; bfloat16. Kernels are compiled with their operands as
arguments of the program, which lie in HBM.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import numerics as nx

TOKENS, HEADS, KV_HEADS, WIDTH, PAGE = 2048, 16, 4, 128, 128
LONG, SELECTED, CORRELATION = 32768, 16, 64
SEQUENCES, CONTEXT = 64, 2048
D_MODEL, D_EXPERT, VOCAB = 1024, 1024, 32768
# Rows of each expert: uneven, as a router gives them; TOKENS in all.
LOADS = (300, 212, 256, 280, 232, 190, 330, 248)

_NUMERICS = nx.Numerics('bfloat16')
_BF16, _F32, _I32 = jnp.bfloat16, jnp.float32, jnp.int32
_struct = jax.ShapeDtypeStruct


def _pool(pages: int):
  """Pages as the engine and the learner hold them: heads side by side."""
  return _struct((pages, PAGE, KV_HEADS * 2 * WIDTH), _BF16)


def visible(window: int | None) -> int:
  """Returns the pairs of a query and a key that it sees, of one head."""
  return int(np.minimum(np.arange(TOKENS) + 1, window or TOKENS).sum())


@functools.cache
def selections() -> np.ndarray:
  """Returns bool [LONG, K, pages]: past pages that a token selects.

  The top `SELECTED` of scores that forget themselves within `CORRELATION`
  tokens, z_t = ρ z_(t-1) + √(1 - ρ²) n_t, ρ = exp(-1 / CORRELATION): neighbours
  select alike, as their queries are alike.
  """
  rng = np.random.default_rng(0)
  pages = LONG // PAGE
  rho = np.exp(-1 / CORRELATION)
  z = rng.normal(size=(KV_HEADS, pages))
  out = np.zeros((LONG, KV_HEADS, pages), bool)
  for t in range(LONG):
    z = rho * z + np.sqrt(1 - rho**2) * rng.normal(size=z.shape)
    past = t // PAGE
    if past <= SELECTED:
      out[t, :, :past] = True
    else:
      top = np.argpartition(-z[:, :past], SELECTED, -1)[:, :SELECTED]
      np.put_along_axis(out[t], top, True, -1)
  return out


def selected_pairs() -> int:
  """Returns the pairs of a query and a key it sees, of one head of `LONG`."""
  page, place = np.divmod(np.arange(LONG), PAGE)
  return int((np.minimum(page, SELECTED) * PAGE + place + 1).sum())


def _only_backward(fun, args, pick=lambda grads: grads):
  """Returns a program of the gradient alone, and its arguments.

  What the forward saves is an argument, so nothing of the forward is compiled.
  """
  with nx.target('tpu'):
    out, pull = jax.eval_shape(lambda *a: jax.vjp(fun, *a), *args)
  return (lambda pull, g: pick(pull(g))), [pull, out]


def _grid(fun, args) -> tuple[int, ...]:
  """Returns the grid of the only Pallas kernel of a program."""
  with nx.target('tpu'):
    todo = [jax.make_jaxpr(fun)(*args).jaxpr]
  grids = []
  while todo:
    for eqn in todo.pop().eqns:
      if eqn.primitive.name == 'pallas_call':
        grids.append(eqn.params['grid_mapping'].grid)
      else:
        todo += jax.core.jaxprs_in_params(eqn.params)
  (grid,) = grids
  return grid


# --------------------------------------------------------------- attention


def our_attention(
    window: int | None = None, backward: bool = False, sparse: bool = False
):
  """`paged_attention` on a packed row.

  Args:
    window: of a sliding window, None for causal attention.
    backward: the gradient instead of the forward.
    sparse: block-sparse attention over `LONG` tokens, see `selections`.
  """
  from kernels_pallas.paged_attention import layout as layouts
  from kernels_pallas.paged_attention import ops
  from kernels_pallas.paged_attention import pallas_tpu
  from kernels_pallas.paged_attention import pallas_tpu_backward

  def run(q, kv, layout, selected=None):
    return ops.paged_attention(
        q,
        kv.reshape(-1, PAGE, KV_HEADS, 2 * WIDTH),
        layout,
        numerics=_NUMERICS,
        window=window,
        selected_TKj=selected,
        impl='pallas',
    )

  tokens = LONG if sparse else TOKENS
  args = [
      _struct((tokens, HEADS, WIDTH), _BF16),
      _pool(tokens // PAGE),
      jax.eval_shape(
          lambda p: layouts.row_layout(p, PAGE), _struct((1, tokens), _I32)
      ),
  ]
  if sparse:
    args.append(_struct((tokens, KV_HEADS, SELECTED), _I32))
  fun = run
  if backward:
    fun, args = _only_backward(run, args, lambda g: g[:2])
  if window is not None:
    return fun, args
  # A tile walks over the pages before its own, some at a time.
  heads, *_, tiles = _grid(fun, args)
  past = np.tile(np.arange(tiles) * TOKENS // tiles // PAGE, heads)
  if sparse:  # the pages that some token of the tile selected
    union = selections().reshape(tiles, tokens // tiles, heads, -1).any(1)
    past = union.sum(-1)
  if backward:  # what is left goes one by one
    at_once = pallas_tpu_backward.AT_ONCE
    loops = [int((past // at_once).sum()), int((past % at_once).sum())]
  else:
    group = HEADS // KV_HEADS
    *_, at_once = pallas_tpu.walk_plan(PAGE, KV_HEADS, group, True, sparse)
    loops = _walked(past, at_once)
  return fun, args, {'paged_attention': dict(loops=loops)}


def our_decode():
  """`paged_attention` of the engine: one token of every sequence."""
  from kernels_pallas.paged_attention import layout as layouts
  from kernels_pallas.paged_attention import ops
  from kernels_pallas.paged_attention import pallas_tpu

  pages = CONTEXT // PAGE
  layout = layouts.Layout(
      _struct((SEQUENCES,), _I32),
      _struct((SEQUENCES,), _I32),
      _struct((SEQUENCES, pages), _I32),
      _struct((SEQUENCES, layouts.QUERY_TILE), _I32),
      _struct((SEQUENCES,), _I32),
  )

  def run(q, kv, layout):
    kv = kv.reshape(-1, PAGE, KV_HEADS, 2 * WIDTH)
    return ops.paged_attention(q, kv, layout, numerics=_NUMERICS, impl='pallas')

  args = [
      _struct((SEQUENCES, HEADS, WIDTH), _BF16),
      _pool(SEQUENCES * pages),
      layout,
  ]
  group = HEADS // KV_HEADS
  *_, at_once = pallas_tpu.walk_plan(PAGE, KV_HEADS, group, False, False)
  past = np.full(_grid(run, args), pages - 1)
  loops = _walked(past, at_once)
  return run, args, {'paged_attention': dict(loops=loops)}


def _walked(past: np.ndarray, at_once: int) -> list[int]:
  """Returns the trips of the loops of a walk over past pages.

  Full steps; then, of every tile's last step, past pages that are awaited and
  places without one that are cleared.

  Args:
    past: past pages of each tile.
    at_once: pages of a step.
  """
  full, left = np.divmod(past, at_once)
  counts = [full, left, at_once - 1 - left] if at_once > 1 else [full]
  return [int(n.sum()) for n in counts]


def splash(
    window: int | None = None,
    phase: str = 'forward',
    queries: int = 512,
    keys: int = 512,
    at_once: int = 512,
    tokens: int = TOKENS,
):
  """JAX's splash attention on one sequence.

  Args:
    window: of a local mask, None for a causal one.
    phase: 'forward', or a backward: 'fused', or 'split' into dq and dkv.
    queries: of a block.
    keys: of a block.
    at_once: keys of one product in it; dq always takes all.
    tokens: of the sequence.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
      splash_attention_kernel as kernels,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
      splash_attention_mask as masks,
  )

  fused = phase == 'fused'
  sizes = dict(
      block_q=queries,
      block_kv=keys,
      block_kv_compute=at_once,
      block_q_dkv=queries,
      block_kv_dkv=keys,
      block_kv_dkv_compute=at_once,
      block_q_dq=None if fused else queries,
      block_kv_dq=None if fused else keys,
  )
  mask = masks.CausalMask((tokens, tokens))
  if window is not None:
    mask = masks.LocalMask((tokens, tokens), (window - 1, 0), 0)
  kernel = kernels.make_splash_mha_single_device(
      masks.MultiHeadMask([mask] * HEADS),
      block_sizes=kernels.BlockSizes(**sizes, use_fused_bwd_kernel=fused),
  )
  kv = _struct((KV_HEADS, tokens, WIDTH), _BF16)
  args = [_struct((HEADS, tokens, WIDTH), _BF16), kv, kv]
  # Blocks with a visible pair: the last query sees the first key of a block,
  # and the first query's window reaches the last.
  first = np.arange(0, tokens, queries)[:, None]
  start = np.arange(0, tokens, keys)
  some = (start < first + queries) & (
      start + keys > first - (window or tokens) + 1
  )
  runs = {'splash_mha': dict(regions=[HEADS * int(some.sum())])}
  if phase == 'forward':
    return kernel, args, runs
  return *_only_backward(kernel, args), runs


def ragged_paged(page: int, pages_per_block: int, queries_per_block: int):
  """JAX's ragged paged attention, every sequence with one token."""
  from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
      kernel as kernels,
  )

  run = functools.partial(
      kernels.ragged_paged_attention,
      num_kv_pages_per_block=pages_per_block,
      num_queries_per_block=queries_per_block,
      sm_scale=WIDTH**-0.5,
  )
  pages = CONTEXT // page
  args = [
      _struct((SEQUENCES, HEADS, WIDTH), _BF16),
      _struct((SEQUENCES * pages, page, 2 * KV_HEADS, WIDTH), _BF16),
      _struct((SEQUENCES,), _I32),
      _struct((SEQUENCES, pages), _I32),
      _struct((SEQUENCES + 1,), _I32),
      _struct((1,), _I32),
  ]
  blocks = SEQUENCES * pages // pages_per_block
  return run, args, {'ragged_paged_attention': dict(loops=[SEQUENCES, blocks])}


# ----------------------------------------------------------------- experts


def our_grouped(phase: str = 'forward'):
  """`grouped_matmul`; phase 'forward', 'rows' or 'weights'."""
  from kernels_pallas.grouped_matmul import ops

  experts = len(LOADS)
  with nx.target('tpu'):
    plan = jax.eval_shape(
        lambda e: ops.plan(e, experts), _struct((TOKENS, 1), _I32)
    )
  rows = plan.slot_of_row_R.shape[0]
  height = rows // plan.expert_of_tile.shape[0]
  used = int(sum(-(-n // height) for n in LOADS))
  args = [
      _struct((rows, D_MODEL), _BF16),
      _struct((experts, D_MODEL, D_EXPERT), _BF16),
      plan,
  ]

  def run(x, w, plan):
    return ops.grouped_matmul(x, w, plan, numerics=_NUMERICS, impl='pallas')

  runs: dict[str, list[int]] = dict(scalars=[used])
  if phase == 'forward':
    return run, args, {'grouped_matmul': runs}
  pick = {'rows': 0, 'weights': 1}[phase]
  fun, args = _only_backward(run, args, lambda g: g[pick])
  if phase == 'weights':
    # Clear an expert, take its first tile, add another; one block of dw.
    runs['regions'] = [0, experts, used - experts]
  return fun, args, {'grouped_matmul': runs}


def megablox(phase: str = 'forward', tiling=(128, 128, 128)):
  """JAX's megablox: gmm for 'forward' and 'rows', tgmm for 'weights'."""
  # The package has a function of the module's name.
  kernels = importlib.import_module(
      'jax.experimental.pallas.ops.tpu.megablox.gmm'
  )
  experts, tiling = len(LOADS), tuple(tiling)
  height, depth, width = tiling
  ends = np.cumsum(LOADS)
  begins = ends - LOADS
  visits = int((-(-ends // height) - begins // height).sum())
  sizes = _struct((experts,), _I32)
  x, g = _struct((TOKENS, D_MODEL), _BF16), _struct((TOKENS, D_EXPERT), _BF16)
  w = _struct((experts, D_MODEL, D_EXPERT), _BF16)
  gmm = functools.partial(kernels.gmm, tiling=tiling)
  tgmm = functools.partial(kernels.tgmm, tiling=tiling)
  over = lambda size, block: -(-size // block)
  runs: dict[str, list[int]] = dict(scalars=[visits])
  if phase == 'weights':
    # Clear the sum of an expert, add a tile of rows, store the sum.
    blocks = over(D_MODEL, depth) * over(D_EXPERT, width)
    runs['regions'] = [blocks * experts, blocks * visits, blocks * experts]
    return tgmm, [_struct(x.shape[::-1], _BF16), g, sizes], {'tgmm': runs}
  if phase == 'rows':
    gmm, x = functools.partial(gmm, transpose_rhs=True), g
  return gmm, [x, w, sizes], {'gmm': runs}


# ---------------------------------------------------------------- log-probs


def _head_args():
  return [
      _struct((TOKENS, D_MODEL), _BF16),
      _struct((D_MODEL, VOCAB), _BF16),
      _struct((TOKENS,), _I32),
  ]


def our_logprobs(backward: bool = False):
  """`logprob_head.logprobs`, which also gives entropies."""
  from kernels_pallas.logprob_head import ops

  def run(x, w, targets):
    return ops.logprobs(
        x, w, targets, temperature=1.0, numerics=_NUMERICS, impl='pallas'
    )

  if not backward:
    return run, _head_args()
  return _only_backward(run, _head_args(), lambda g: g[:2])


def xla_logprobs(backward: bool = False):
  """`jax.nn.log_softmax` of the logits, computed again for the gradient."""

  @jax.checkpoint
  def run(x, w, targets):
    z = jnp.dot(x, w, preferred_element_type=_F32)
    z = jax.nn.log_softmax(z, -1)
    logp = jnp.take_along_axis(z, targets[:, None], -1)[:, 0]
    return logp, -(jnp.exp(z) * z).sum(-1)

  if not backward:
    return run, _head_args()
  return _only_backward(run, _head_args(), lambda g: g[:2])
