"""The exactness matrix of this machine: what must be equal to the bit, counted.

Two kinds of rows. Of an op, the same inputs in different company: `batch` (a
few of the rows between rows of NaN, in a smaller program), `place` (the same
rows in another order; of attention: in the engine's stream instead of packed
rows), `pages` (of attention: cut into chunks of random size and order, over
other pages) and `gradient` (the forward within a gradient program against the
forward alone). Of a small policy, `traffic`: what the engine recorded when it
drew the tokens against what the learner's gradient program finds for them.

The control arm is a policy with `Numerics(exact=False)`. It shows that the
check can fail; where XLA happens to sum alike in both programs it does not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from agentic_rl import numerics as bits
from agentic_rl.diagnostics import policy_matrix
from agentic_rl.diagnostics import streams
from agentic_rl.diagnostics import traffic
from agentic_rl.policy import model
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import engine as engine_lib
from kernels_pallas import numerics as nx
from kernels_pallas.block_selection import ops as selection
from kernels_pallas.fp8_matmul import ops as fp8
from kernels_pallas.grouped_matmul import ops as grouped
from kernels_pallas.logprob_head import ops as head
from kernels_pallas.matmul import ops as dense
from kernels_pallas.paged_attention import ops as attention
from kernels_pallas.row_ops import ops as rows

DTYPES = ('bfloat16', 'float32')


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Shapes of the matrix.

  Attributes:
    rows: T, of the ops on rows; a multiple of the row tile.
    width: D.
    columns: F.
    vocab: V.
    experts: E.
    heads: N.
    kv_heads: K.
    head_width: H.
    page: C.
    window: of attention.
    row_tokens: of attention's packed rows; nine pages are used.
    stream: (tokens, tiles) of attention's streams.
    policy: fields of the small policy.
    scripts: sequences that it plays.
    steps: sizes of its engine's step program.
    learner: rows of a microbatch; a row holds the policy's context.
  """

  rows: int
  width: int
  columns: int
  vocab: int
  experts: int
  heads: int
  kv_heads: int
  head_width: int
  page: int
  window: int
  row_tokens: int
  stream: tuple[int, int]
  policy: Mapping[str, Any]
  scripts: int
  steps: tuple[tuple[int, int], ...]
  learner: int


SMALL = Sizes(
    rows=128,
    width=96,
    columns=40,
    vocab=600,
    experts=4,
    heads=4,
    kv_heads=2,
    head_width=8,
    page=16,
    window=11,
    row_tokens=80,
    stream=(128, 40),
    policy=dict(
        vocab=64,
        width=64,
        layers=2,
        pattern='wb',
        heads=4,
        kv_heads=2,
        experts=4,
        expert_width=32,
        window=12,
        page=8,
        topk_pages=2,
        max_context=64,
    ),
    scripts=20,
    steps=((128, 24),),
    learner=4,
)
LARGE = Sizes(
    rows=512,
    width=1024,
    columns=1024,
    vocab=4096,
    experts=8,
    heads=8,
    kv_heads=2,
    head_width=128,
    page=128,
    window=128,
    row_tokens=1024,
    stream=(1024, 384),
    policy=dict(
        vocab=2048,
        width=512,
        layers=7,
        pattern='wbf',
        heads=4,
        kv_heads=2,
        head_width=128,
        expert_width=256,
        dense_layers=1,
        dense_width=1024,
        window=128,
        page=64,
        topk_pages=2,
        max_context=512,
        remat=True,
    ),
    scripts=24,
    steps=((64, 16), (256, 48)),
    learner=4,
)


@dataclasses.dataclass(frozen=True)
class Found:
  """A row of the matrix.

  Attributes:
    op: name in `OPS`, or 'policy'.
    impl: of the kernels.
    dtype: of activations and weights; 'fp8' for the product of e4m3 numbers.
    exact: False for the control arm, which may differ.
    check: what was compared, see the module.
    compared: numbers, or drawn tokens of a policy; None if it failed.
    unequal: how many of them differ in a bit.
    flips: experts of tokens that differ; 0 for an op.
    error: why it was not measured, or ''.
  """

  op: str
  impl: str
  dtype: str
  exact: bool
  check: str
  compared: int | None = None
  unequal: int | None = None
  flips: int = 0
  error: str = ''


# A check: its name, how many numbers were compared, how many are unequal.
_Counts = tuple[str, int, int]


def impls(op: str) -> tuple[str, ...]:
  """Returns the implementations of an op that run here, that of 'auto' first.

  Args:
    op: name in `OPS`.
  """
  names = ('pallas', 'xla') if nx.platform() == 'tpu' else ('xla', 'pallas')
  return tuple(n for n in names if all(_runs(n, t) for t in TABLES[op]))


def _runs(impl: str, table: dict[str, Any]) -> bool:
  try:
    nx.choose(impl, table, 'op')
  except ValueError:
    return False
  return True


def dtypes(op: str, impl: str) -> tuple[str, ...]:
  """Returns the dtypes in which an op is checked."""
  if op == 'fp8_matmul':
    return ('fp8',)
  # On a GPU the tensor cores take no float32.
  only_half = impl == 'pallas' and nx.platform() == 'gpu'
  return ('bfloat16',) if only_half else DTYPES


@dataclasses.dataclass(frozen=True)
class Job:
  """Some rows of the matrix that are measured together.

  Attributes:
    op: as in `Found`.
    impl: as in `Found`.
    dtype: as in `Found`.
    exact: as in `Found`.
    measure: does it.
  """

  op: str
  impl: str
  dtype: str
  exact: bool
  measure: Callable[[], list[Found]]

  def found(self, check: str, **fields) -> Found:
    """Returns a row of this job."""
    return Found(self.op, self.impl, self.dtype, self.exact, check, **fields)


def jobs(sizes: Sizes) -> list[Job]:
  """Returns all jobs: policies, then ops; those of 'auto' first.

  Policies run on the kernels of 'auto', on a GPU on its own ones, too. The
  control arm runs on 'xla', whose sums `Numerics(exact=False)` leaves to the
  compiler.
  """
  auto = impls('matmul')[0]
  out = [_policy_job(sizes, auto, dtype, True) for dtype in DTYPES]
  if nx.platform() == 'gpu':
    out.append(_policy_job(sizes, 'pallas', 'bfloat16', True))
  out.append(_policy_job(sizes, 'xla', 'float32', False))
  ops = [
      _op_job(o, sizes, i, d)
      for o in OPS
      for i in impls(o)
      for d in dtypes(o, i)
  ]
  return out + sorted(ops, key=lambda job: job.impl != auto)


def _op_job(op: str, sizes: Sizes, impl: str, dtype: str) -> Job:
  def measure():
    num = nx.Numerics('bfloat16' if dtype == 'fp8' else dtype)
    counts = OPS[op](num, impl, sizes)
    return [job.found(c, compared=n, unequal=u) for c, n, u in counts]

  job = Job(op, impl, dtype, True, measure)
  return job


def _policy_job(sizes: Sizes, impl: str, dtype: str, exact: bool) -> Job:
  def measure():
    cfg = PolicyConfig(**sizes.policy, precision=dtype, impl=impl, exact=exact)
    return [job.found('traffic', **_traffic(cfg, sizes))]

  job = Job('policy', impl, dtype, exact, measure)
  return job


# ------------------------------------------------------------------- policy


def _traffic(cfg: PolicyConfig, sizes: Sizes) -> dict[str, int]:
  """Plays traffic, takes the gradient on it and counts what differs."""
  weights = model.init(cfg, 0)
  engine = engine_lib.Engine(
      cfg,
      0,
      max_sequences=8,
      pool_pages=5 * cfg.pages_per_sequence,
      steps=sizes.steps,
  )
  engine.load_params(weights, 0)
  scripts = traffic.draw_scripts(cfg, sizes.scripts)
  examples = traffic.examples(scripts, traffic.play(engine, scripts))
  learner = policy_matrix.make_learner(cfg, sizes.learner, cfg.max_context)
  found = policy_matrix.by_gradient(learner, weights, examples)
  return dict(
      compared=found.positions,
      unequal=found.unequal_bits,
      flips=found.route_flips,
  )


# -------------------------------------------------------------- ops on rows


def _normal(num: nx.Numerics, seed: int, shape, scale: float = 1.0):
  """Returns normal numbers that the dtype can hold, in its storage."""
  x = np.random.default_rng(seed).normal(size=shape) * scale
  return num.cast(jnp.asarray(x, jnp.float32))


def _unequal(a, b) -> tuple[int, int]:
  """Returns how many numbers two trees hold and how many are unequal."""
  compared = unequal = 0
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    compared += x.size
    if x.dtype.kind == 'i':
      unequal += int((x != y).sum())
    else:
      unequal += bits.unequal_bits(x, y)
  return compared, unequal


def _with_gradient(fun, args):
  """Returns fun(*args) as computed within a gradient program."""

  def loss(*args):
    out = fun(*args)
    floats = [x for x in jax.tree.leaves(out) if _is_float(x)]
    return sum(jnp.square(x.astype(jnp.float32)).sum() for x in floats), out

  floats = [i for i, x in enumerate(args) if _is_float(x)]
  program = jax.value_and_grad(loss, floats, has_aux=True)
  (_, out), grads = nx.jit(program)(*args)
  jax.block_until_ready(grads)
  return out


def _is_float(x) -> bool:
  dtype = getattr(x, 'dtype', None)
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _purity(
    fun, by_row: Sequence[Any], rest: Sequence[Any] = (), gradient: bool = True
) -> Iterator[_Counts]:
  """Compares the rows of fun(*by_row, *rest) in different company."""
  run = nx.jit(fun)
  count = by_row[0].shape[0]
  whole = run(*by_row, *rest)
  rng = np.random.default_rng(0)
  take = lambda tree, at: jax.tree.map(lambda a: a[at], tree)

  picked, places = rng.permutation(count)[:5], rng.permutation(nx.ROW_TILE)[:5]
  source = np.zeros(nx.ROW_TILE, np.int32)
  source[places] = picked
  mine = np.isin(np.arange(nx.ROW_TILE), places)

  def few(x):
    x = x[source]
    if not _is_float(x):
      return x
    return jnp.where(mine.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)

  out = run(*map(few, by_row), *rest)
  yield 'batch', *_unequal(take(out, places), take(whole, picked))
  order = rng.permutation(count)
  out = run(*take(tuple(by_row), order), *rest)
  yield 'place', *_unequal(out, take(whole, order))
  if gradient:
    out = _with_gradient(fun, (*by_row, *rest))
    yield 'gradient', *_unequal(out, whole)


def _matmul(num, impl, sizes):
  x = _normal(num, 0, (sizes.rows, sizes.width))
  w = _normal(num, 1, (sizes.width, sizes.columns), sizes.width**-0.5)
  fun = lambda x, w: dense.matmul(x, w, numerics=num, impl=impl)
  return _purity(fun, [x], [w])


def _fp8_matmul(num, impl, sizes):
  x = _normal(num, 0, (sizes.rows, sizes.width))
  w = _normal(num, 1, (sizes.width, sizes.columns), sizes.width**-0.5)
  fun = lambda x, w: fp8.fp8_matmul(x, w, numerics=num, impl=impl)
  return _purity(fun, [x], [w])


def _grouped_matmul(num, impl, sizes):
  rng, experts = np.random.default_rng(2), sizes.experts
  chosen = np.argsort(rng.random((sizes.rows, experts)), 1)[:, :2]
  weights = rng.random((sizes.rows, 2)).astype(np.float32)
  w = _normal(num, 1, (experts, sizes.width, sizes.columns), sizes.width**-0.5)

  def fun(x, weights, chosen, w):
    plan = grouped.plan(chosen, experts)
    y = grouped.grouped_matmul(
        grouped.dispatch(x, plan), w, plan, numerics=num, impl=impl
    )
    return grouped.combine(num.cast(y), weights, plan, numerics=num)

  x = _normal(num, 0, (sizes.rows, sizes.width))
  chosen = jnp.asarray(chosen, jnp.int32)
  return _purity(fun, [x, jnp.asarray(weights), chosen], [w])


def _rms_norm(num, impl, sizes):
  x = _normal(num, 0, (sizes.rows, sizes.width))
  gain = _normal(num, 1, (sizes.width,))
  fun = lambda x, g: rows.rms_norm(x, g, numerics=num, impl=impl)
  return _purity(fun, [x], [gain])


def _rope(num, impl, sizes):
  x = _normal(num, 0, (sizes.rows, sizes.heads, sizes.head_width))
  positions = jnp.arange(sizes.rows, dtype=jnp.int32) * 7 % 4096
  fun = lambda x, p: rows.rope(x, p, numerics=num, impl=impl)
  return _purity(fun, [x, positions])


def _swiglu(num, impl, sizes):
  both = [_normal(num, i, (sizes.rows, sizes.width)) for i in (0, 1)]
  fun = lambda a, b: rows.swiglu(a, b, numerics=num, impl=impl)
  return _purity(fun, both)


def _router(num, impl, sizes):
  logits = _normal(nx.Numerics(), 0, (sizes.rows, sizes.experts))
  bias = _normal(nx.Numerics(), 1, (sizes.experts,), 0.01)
  fun = lambda l, b: rows.router(
      l, b, topk=2, gating='softmax', numerics=num, impl=impl
  )
  return _purity(fun, [logits], [bias])


def _head_args(num, sizes):
  x = _normal(num, 0, (sizes.rows, sizes.width))
  return x, _normal(num, 1, (sizes.width, sizes.vocab), 2 * sizes.width**-0.5)


def _logprobs(num, impl, sizes):
  x, w = _head_args(num, sizes)
  targets = jnp.arange(sizes.rows, dtype=jnp.int32) * 13 % sizes.vocab
  fun = lambda x, y, w: head.logprobs(
      x, w, y, temperature=1.0, numerics=num, impl=impl
  )
  return _purity(fun, [x, targets], [w])


def _sample(num, impl, sizes):
  x, w = _head_args(num, sizes)
  keys = jax.random.split(jax.random.key(0), sizes.rows)
  fun = lambda x, k, w: head.sample(
      x, w, k, temperature=1.0, numerics=num, impl=impl
  )
  return _purity(fun, [x, keys], [w], gradient=False)


def _page_means(num, impl, sizes):
  shape = (nx.ROW_TILE, sizes.page, sizes.kv_heads, 2 * sizes.head_width)
  fun = lambda kv: selection.page_means(kv, numerics=num, impl=impl)
  return _purity(fun, [_normal(num, 0, shape)], gradient=False)


# ---------------------------------------------------------------- attention

_PACK = ((0, 4), (1, 2, 3))  # rows of five and four pages


def _world(num, sizes) -> streams.World:
  page, heads = sizes.page, (sizes.heads, sizes.kv_heads)
  widths = sizes.head_width, 2 * sizes.head_width
  lengths = (1, page - 1, page, page + 1, 3 * page + 5)
  q, kv = (
      [
          np.asarray(_normal(num, 9 * i + j, (n, heads[j], widths[j])))
          for i, n in enumerate(lengths)
      ]
      for j in (0, 1)
  )
  return streams.World(page, lengths, q, kv)


def _attention(kind: str):
  """Returns the check of 'full', 'window' or 'block' attention.

  'block' selects its pages in the same program, and these are compared, too.
  """

  def check(num, impl, sizes) -> Iterator[_Counts]:
    def fun(q, kv, layout):
      selected = None
      if kind == 'block':
        selected = selection.select_pages(
            q,
            selection.page_means(kv, numerics=num, impl=impl),
            layout,
            page_size=sizes.page,
            topk=2,
            numerics=num,
            impl=impl,
        )
      out = attention.paged_attention(
          q,
          kv,
          layout,
          numerics=num,
          window=sizes.window if kind == 'window' else None,
          selected_TKj=selected,
          impl=impl,
      )
      return (out,) if selected is None else (out, selected)

    return _streams(fun, _world(num, sizes), sizes)

  return check


def _streams(fun, data: streams.World, sizes: Sizes) -> Iterator[_Counts]:
  """Compares the learner's packed rows with the engine's streams."""
  run = nx.jit(fun)
  *packed, place = streams.packed(data, _PACK, sizes.row_tokens)
  whole = run(*packed)

  def compare(out, its_place):
    compared = unequal = 0
    for a, b in zip(out, whole, strict=True):
      a = streams.by_place(a, its_place)
      b = streams.by_place(b, place)
      shared = [p for p in a if p in b]
      both = [np.stack([x[p] for p in shared]) for x in (a, b)]
      n, u = _unequal(*both)
      compared, unequal = compared + n, unequal + u
    return compared, unequal

  def stream(chunks, seed, tokens, tiles):
    kv, table = streams.pool(data, seed)
    q, layout, at = streams.stream(data, table, chunks, tokens, tiles)
    return compare(run(q, jnp.asarray(kv), layout), at)

  last = [(s, n - 1, 1) for s, n in reversed([*enumerate(data.lengths)])]
  yield 'batch', *stream(last, 3, nx.ROW_TILE, 7)
  yield 'place', *stream(streams.whole(data), 0, *sizes.stream)
  yield 'pages', *stream(streams.pieces(data, 1), 1, *sizes.stream)
  yield 'gradient', *_unequal(_with_gradient(fun, packed), whole)


# What is checked: (numerics, impl, sizes) -> counts of each check.
OPS: dict[str, Callable[[nx.Numerics, str, Sizes], Iterator[_Counts]]] = {
    'matmul': _matmul,
    'fp8_matmul': _fp8_matmul,
    'grouped_matmul': _grouped_matmul,
    'rms_norm': _rms_norm,
    'rope': _rope,
    'swiglu': _swiglu,
    'router': _router,
    'logprobs': _logprobs,
    'sample': _sample,
    'page_means': _page_means,
    'attention full': _attention('full'),
    'attention window': _attention('window'),
    'attention block': _attention('block'),
}
# The tables of implementations of what each check runs.
TABLES: dict[str, tuple[dict[str, Any], ...]] = {
    'matmul': (dense.IMPLS,),
    'fp8_matmul': (fp8.IMPLS,),
    'grouped_matmul': (grouped.IMPLS,),
    **dict.fromkeys(('rms_norm', 'rope', 'swiglu', 'router'), (rows.IMPLS,)),
    **dict.fromkeys(('logprobs', 'sample'), (head.IMPLS,)),
    'page_means': (selection.IMPLS,),
    'attention full': (attention.IMPLS,),
    'attention window': (attention.IMPLS,),
    'attention block': (attention.IMPLS, selection.IMPLS),
}
