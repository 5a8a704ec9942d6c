"""The sampler: continuous batching over paged KV, in this process.

One step program takes a stream in which decode tokens and prefill chunks of
many sequences stand side by side. The engine keeps JetStream's verbs: `prefill`
gives the engine tokens to read, `insert` opens a sequence, `generate` runs a
step and returns what was drawn. What a sequence draws depends on (weights, its
tokens, seed, rollout id) only, never on its company in the batch.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from agentic_rl.parallel import mesh
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import identity
from agentic_rl.policy import model
from agentic_rl.policy import routing
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import paged_kv
from kernels_pallas import numerics as nx
from kernels_pallas.logprob_head import ops as head_ops
from kernels_pallas.paged_attention import layout as layouts


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn.

  Attributes:
    temperature: 0 is greedy.
    top_k: 0 for all tokens.
    top_p: in (0, 1].
    keep_support: record, with each token, the tokens that top-k and top-p left,
      and its log-prob among them; needs a top_k.

  Raises:
    ValueError: on a value outside its range.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  keep_support: bool = False

  def __post_init__(self):
    head_ops.check_sampling(
        self.temperature, self.top_k, self.top_p, self.keep_support
    )


@dataclasses.dataclass(frozen=True)
class Drawn:
  """One token that a step drew for a sequence.

  Attributes:
    slot: of the sequence.
    token: what was drawn.
    logp: its log-prob, float32.
    likeliest: the likeliest tokens, best first, if the engine reports them.
  """

  slot: int
  token: int
  logp: float
  likeliest: tuple[int, ...] = ()
  support: np.ndarray | None = None  # int32 [k], if it is recorded


@dataclasses.dataclass
class _Sequence:
  """A live sequence: its tokens, how many are in the cache, its pages."""

  rollout_id: int
  tokens: list[int]
  done: int = 0
  pages: list[int] = dataclasses.field(default_factory=list)
  routes: list[np.ndarray] = dataclasses.field(default_factory=list)
  keys: list[bytes] = dataclasses.field(default_factory=list)
  forced: collections.deque[int] = dataclasses.field(
      default_factory=collections.deque
  )
  sample: bool = True


@dataclasses.dataclass(frozen=True)
class StepShape:
  """Static size of one step program.

  Attributes:
    tokens: stream length, a multiple of the row tile.
    tiles: query tiles; a decode token takes one, a chunk one per 8 positions.
  """

  tokens: int
  tiles: int


class Engine:
  """Draws tokens for many sequences at once.

  Args:
    cfg: shape of the policy.
    seed: of every draw.
    max_sequences: sequences that can be open at once.
    pool_pages: KV pages; 0 for enough that every sequence can fill its context.
    steps: sizes of the step program, small to large; one compilation each.
    sampling: how tokens are drawn, fixed for the engine's programs.
    likeliest: report so many of the likeliest tokens with each draw; 0 outside
      diagnostics.
    route_weights: record the weights of the experts, too.

  Attributes:
    greedy: draw the likeliest token instead, in the same programs.
    version: version of the weights.
    weights_hash: of the weights that the engine holds.
    pages: the page pool.

  Raises:
    ValueError: if the sizes do not fit the policy.
  """

  def __init__(
      self,
      cfg: PolicyConfig,
      seed: int,
      *,
      max_sequences: int,
      pool_pages: int = 0,
      steps: Sequence[tuple[int, int]] = (),
      sampling: Sampling = Sampling(),
      likeliest: int = 0,
      route_weights: bool = False,
  ):
    self.cfg = cfg
    self.max_sequences = max_sequences
    self.steps = _check_steps(steps, max_sequences)
    pages = pool_pages or max_sequences * cfg.pages_per_sequence
    if pages < cfg.pages_per_sequence:
      raise ValueError(
          f'pool_pages={pages}: one sequence of max_context='
          f'{cfg.max_context} needs {cfg.pages_per_sequence}'
      )
    self.pages = paged_kv.PagePool(pages, cfg.page)
    self._pool: forward_lib.Pool | None = None
    self._slots: list[_Sequence | None] = [None] * max_sequences
    self._reserved = 0
    self._weights: Any = None
    self._seed = seed
    self.version, self.weights_hash = -1, ''
    self._counts = dict(steps=0, decoded=0, prefilled=0, padded=0)
    self._sample_rows = -(-max_sequences // nx.ROW_TILE) * nx.ROW_TILE
    self.greedy = False
    self._step = step_program(
        cfg, sampling, likeliest, route_weights, mesh.SINGLE
    )
    self._route_dtype = routing.RECORD if route_weights else np.int16

  def load_params(self, weights: Any, version: int) -> None:
    """Takes the weights of a version; pages of others become misses.

    Pages are kept only if both the version and what the weights hold are as
    before.

    Raises:
      RuntimeError: if a sequence is open (its KV belongs to other weights).
    """
    if any(self._slots):
      raise RuntimeError('weights can not change while sequences are open')
    found = identity.weights_hash(weights)
    if (version, found) != (self.version, self.weights_hash):
      self.pages.forget_all()
    self._weights = weights
    self.version, self.weights_hash = version, found

  @property
  def weights(self) -> Any:
    """The weights that the engine holds."""
    return self._weights

  # --- JetStream's verbs ---

  def can_insert(self) -> bool:
    """True if a slot and the pages of a whole context are free."""
    need = self.cfg.pages_per_sequence
    room = self.pages.num_pages - self._reserved
    return None in self._slots and room >= need

  def insert(self, rollout_id: int, tokens: Sequence[int]) -> int:
    """Opens a sequence and reads its prompt; known prefix pages are reused.

    Args:
      rollout_id: identifies the random stream of the sequence.
      tokens: prompt ids, at least one, fewer than the context.

    Returns:
      The slot of the sequence.

    Raises:
      ValueError: if the prompt does not fit the context.
      RuntimeError: if there is no room; ask `can_insert` first.
    """
    if not 0 < len(tokens) < self.cfg.max_context:
      raise ValueError(
          f'prompt of {len(tokens)} tokens: 1..{self.cfg.max_context - 1} fit'
          ' the context'
      )
    if not self.can_insert():
      raise RuntimeError('no free slot or too few free KV pages')
    slot = self._slots.index(None)
    seq = _Sequence(rollout_id, list(tokens))
    self._slots[slot] = seq
    self._reserved += self.cfg.pages_per_sequence
    self._take_known_pages(seq)
    return slot

  def prefill(self, slot: int, tokens: Sequence[int]) -> None:
    """Appends tokens that the policy did not draw (a tool's answer).

    Raises:
      ValueError: if the sequence would fill its context.
    """
    seq = self._sequence(slot)
    if len(seq.tokens) + len(tokens) >= self.cfg.max_context:
      raise ValueError(
          f'{len(seq.tokens)} + {len(tokens)} tokens do not fit the context of'
          f' {self.cfg.max_context}'
      )
    seq.tokens.extend(tokens)
    seq.sample = True

  def force(self, slot: int, tokens: Sequence[int]) -> None:
    """Makes these tokens the next draws of a sequence.

    They run through the program that draws, and so do their log-probs.

    Raises:
      ValueError: on a token outside the vocabulary.
    """
    seq = self._sequence(slot)
    for token in tokens:
      if not 0 <= token < self.cfg.vocab:
        raise ValueError(f'token {token}: allowed are 0..{self.cfg.vocab - 1}')
    seq.forced.extend(tokens)

  def pause(self, slot: int) -> None:
    """Stops drawing for a sequence until the next `prefill`."""
    self._sequence(slot).sample = False

  def paused(self, slot: int) -> bool:
    """True between `pause` and the next `prefill`."""
    return not self._sequence(slot).sample

  def generate(self) -> list[Drawn]:
    """Runs one step and appends what was drawn to the sequences.

    Returns:
      The drawn tokens; a sequence still reading its prompt draws nothing.
    """
    chunks, size = self.schedule()
    if not chunks:
      return []
    if self._pool is None:
      self._pool = forward_lib.init_pool(self.cfg, self.pages.num_pages)
    batch, samplers = self.stage(chunks, size)
    self._pool, found = self._step(
        self._weights,
        self._pool,
        batch,
        np.uint32(self._seed),
        np.float32(not self.greedy),
    )
    return self.book(chunks, samplers, jax.device_get(found))

  def release(self, slot: int) -> tuple[list[int], np.ndarray]:
    """Closes a sequence; its full pages stay known.

    Returns:
      Its tokens and the routes [T, L_moe, topk], -1 for tokens never read; an
      array of `routing.RECORD` if weights are recorded.
    """
    seq = self._sequence(slot)
    for page in reversed(seq.pages):  # a tail is evicted before its beginning
      self.pages.release(page)
    self._slots[slot] = None
    self._reserved -= self.cfg.pages_per_sequence
    cfg = self.cfg
    shape = (len(seq.tokens), cfg.moe_layers, cfg.topk_experts)
    routes = np.full(shape, -1, self._route_dtype)
    if seq.routes:
      known = np.concatenate(seq.routes)
      routes[: len(known)] = known
    return seq.tokens, routes

  @property
  def counts(self) -> dict[str, int]:
    """Steps, tokens and KV pages so far; `kv_peak` is the most in use."""
    pages = self.pages
    return dict(
        self._counts,
        kv_hits=pages.hits,
        kv_misses=pages.misses,
        kv_peak=pages.peak,
    )

  @property
  def busy(self) -> bool:
    """True if a step would do something."""
    return any(s is not None and _pending(s) for s in self._slots)

  @property
  def reading(self) -> bool:
    """True while some sequence has tokens to read before it can draw."""
    return any(
        s is not None and len(s.tokens) - s.done > 1 for s in self._slots
    )

  def length(self, slot: int) -> int:
    """Tokens of the sequence so far."""
    return len(self._sequence(slot).tokens)

  # --- one step ---

  def _sequence(self, slot: int) -> _Sequence:
    seq = self._slots[slot]
    if seq is None:
      raise KeyError(f'slot {slot} holds no sequence')
    return seq

  def _page_keys(self, tokens) -> list[bytes]:
    weights = f'{self.version} {self.weights_hash}'
    return paged_kv.page_keys(tokens, self.cfg.page, weights)

  def _take_known_pages(self, seq: _Sequence) -> None:
    size = self.cfg.page
    keys = self._page_keys(seq.tokens[:-1])
    for key in keys:
      found = self.pages.find(key)
      if found is None:
        break
      seq.pages.append(found[0])
      seq.routes.append(found[1])
      seq.keys.append(key)
      seq.done += size

  def schedule(self) -> tuple[list[tuple[int, int]], int]:
    """Chooses the (slot, count) chunks of a step: decode first, then prefill.

    Returns:
      The chunks, and which of the step sizes they need.
    """
    work = [
        (slot, seq)
        for slot, seq in enumerate(self._slots)
        if seq is not None and _pending(seq)
    ]
    work.sort(key=lambda item: len(item[1].tokens) - item[1].done > 1)
    for size in range(len(self.steps)):
      chunks, whole = _fill(work, self.steps[size])
      if whole:
        break
    return chunks, size

  def stage(self, chunks, step: int):
    """Packs chunks into the inputs of a step program.

    Args:
      chunks: from `schedule`; may be none.
      step: which of the step sizes, at least the one scheduled.

    Returns:
      The inputs, and the slots that draw, in the order of the drawn tokens.
    """
    shape = self.steps[step]
    n, tile, size = shape.tokens, layouts.QUERY_TILE, self.cfg.page
    tokens = np.zeros(n, np.int32)
    positions = np.zeros(n, np.int32)
    sequences = np.zeros(n, np.int32)
    pages = np.full(n, self.pages.bin, np.int32)
    tiles = np.full((shape.tiles, tile), n, np.int32)
    place = np.full(n, shape.tiles * tile, np.int32)
    table = np.full(
        (self.max_sequences, self.cfg.pages_per_sequence),
        self.pages.bin,
        np.int32,
    )
    rows = np.full(self._sample_rows, n, np.int32)
    ids = np.zeros((self._sample_rows, 2), np.int32)
    forced = np.full(self._sample_rows, -1, np.int32)
    full: list[int] = []
    samplers: list[int] = []
    at = t = 0
    for slot, count in chunks:
      seq = self._sequence(slot)
      start, end = seq.done, seq.done + count
      while len(seq.pages) * size < end:
        seq.pages.append(self.pages.allocate())
      pos = np.arange(start, end)
      own = np.asarray(seq.pages, np.int32)
      span = slice(at, at + count)
      tokens[span] = seq.tokens[start:end]
      positions[span] = pos
      sequences[span] = slot
      pages[span] = own[pos // size]
      table[slot, : len(own)] = own
      lane = t + pos // tile - start // tile
      tiles[lane, pos % tile] = np.arange(at, at + count)
      place[span] = lane * tile + pos % tile
      t = int(lane[-1]) + 1
      full.extend(own[start // size : end // size])
      if end == len(seq.tokens) and seq.sample:
        rows[len(samplers)] = at + count - 1
        ids[len(samplers)] = seq.rollout_id, end
        if seq.forced:
          forced[len(samplers)] = seq.forced[0]
        samplers.append(slot)
      at += count
    finished = np.full(n // size + self.max_sequences, self.pages.bin, np.int32)
    finished[: len(full)] = full
    self._counts['steps'] += 1
    self._counts['prefilled'] += at - sum(c == 1 for _, c in chunks)
    self._counts['padded'] += n - at
    layout = layouts.Layout(positions, sequences, table, tiles, place)
    writes = forward_lib.Writes(pages, positions % size, finished)
    return (tokens, layout, writes, rows, ids, forced), samplers

  def book(self, chunks, samplers, found) -> list[Drawn]:
    """Books what a step computed and drew.

    Args:
      chunks: from `schedule`.
      samplers: from `stage`.
      found: of the step, as NumPy arrays: drawn tokens and their log-probs in
        the order of the samplers, routes [T, L_moe, topk] (with weights:
        `routing.Routes`), the likeliest tokens and the support, or None.

    Returns:
      What was drawn.
    """
    tokens, logps, routes, likeliest, support = found
    if self._route_dtype == routing.RECORD:
      routes = routing.join(*routes)
    self._advance(chunks, routes)
    drawn = []
    for i, slot in enumerate(samplers):
      seq = self._sequence(slot)
      seq.tokens.append(int(tokens[i]))
      if seq.forced:
        seq.forced.popleft()
      best = tuple(likeliest[i].tolist())
      among = None if support is None else support[i]
      drawn.append(Drawn(slot, int(tokens[i]), logps[i], best, among))
    self._counts['decoded'] += len(drawn)
    return drawn

  def _advance(self, chunks, routes) -> None:
    """Books what a step computed: routes, and full pages for reuse."""
    at, size = 0, self.cfg.page
    for slot, count in chunks:
      seq = self._sequence(slot)
      seq.routes.append(routes[at : at + count])
      seq.done += count
      at += count
      if seq.done // size > len(seq.keys):
        self._remember_pages(seq)

  def _remember_pages(self, seq: _Sequence) -> None:
    size = self.cfg.page
    known = np.concatenate(seq.routes)
    seq.routes = [known]
    keys = self._page_keys(seq.tokens[: seq.done])
    for i in range(len(seq.keys), len(keys)):
      page_routes = known[i * size : (i + 1) * size]
      self.pages.remember(seq.pages[i], keys[i], page_routes)
    seq.keys = keys


def supports(by_place: Mapping[int, np.ndarray | None], count: int):
  """Returns int32 [count, k] of the supports of some places, -1 elsewhere.

  Args:
    by_place: int32 [k] by place; None where it was not recorded.
    count: tokens of the sequence.

  Returns:
    None if none was recorded.
  """
  known = {p: x for p, x in by_place.items() if x is not None}
  if not known:
    return None
  rows = np.stack(list(known.values()))
  out = np.full((count, rows.shape[1]), -1, np.int32)
  out[list(known)] = rows
  return out


def _pending(seq: _Sequence) -> bool:
  return len(seq.tokens) > seq.done and (
      seq.sample or len(seq.tokens) - seq.done > 1
  )


def _fill(work, shape: StepShape):
  """Returns chunks that fit the shape, and whether all work did."""
  tile = layouts.QUERY_TILE
  chunks, tokens, tiles, whole = [], shape.tokens, shape.tiles, True
  for slot, seq in work:
    left = len(seq.tokens) - seq.done
    reach = tiles * tile - seq.done % tile  # positions the free tiles can take
    count = min(left, tokens, max(reach, 0))
    whole &= count == left
    if count > 0:
      chunks.append((slot, count))
      tokens -= count
      tiles -= (seq.done + count - 1) // tile - seq.done // tile + 1
  return chunks, whole


def _check_steps(steps, max_sequences: int) -> list[StepShape]:
  rows = -(-max_sequences // nx.ROW_TILE) * nx.ROW_TILE
  shapes = [StepShape(*s) for s in steps] or [
      StepShape(rows, max_sequences),
      StepShape(2 * rows, max_sequences + rows // 4),
      StepShape(4 * rows, max_sequences + rows // 2),
  ]
  for shape in shapes:
    if shape.tokens % nx.ROW_TILE or shape.tokens < 1 or shape.tiles < 1:
      raise ValueError(
          f'step {shape}: tokens must be a multiple of {nx.ROW_TILE} and tiles'
          ' at least 1'
      )
  return shapes


@functools.lru_cache(maxsize=32)
def step_program(
    cfg: PolicyConfig,
    sampling: Sampling,
    likeliest: int,
    route_weights: bool,
    parallel: mesh.Parallel,
):
  """Compiles one step: forward, then a draw for the rows that ask for one.

  Args:
    cfg: shape of the policy.
    sampling: how tokens are drawn.
    likeliest: likeliest tokens to report with each draw.
    route_weights: whether routes carry the experts' weights.
    parallel: the mesh; then the inputs from `Engine.stage`, and what is found,
      have a first axis of devices, and so have the pool's pages.

  Returns:
    (weights, pool, inputs, seed, noise) -> (pool, found); see `Engine.book`.
  """

  def step(weights, pool, batch, seed, noise):
    if parallel.mesh is not None:
      batch = jax.tree.map(lambda a: a[0], batch)
    tokens, layout, writes, rows, ids, forced = batch
    x, routes, pool = forward_lib.forward(
        weights,
        tokens,
        layout,
        cfg,
        pool,
        writes,
        parallel,
        route_weights=route_weights,
    )
    x = x.at[rows].get(mode='fill', fill_value=0)
    key = jax.random.key(seed)

    def fold(pair):
      return jax.random.fold_in(jax.random.fold_in(key, pair[0]), pair[1])

    w = forward_lib.head(weights, cfg, parallel)
    drawn, logp, *support = head_ops.sample(
        x,
        w,
        jax.vmap(fold)(ids),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        noise=noise,
        forced_T=forced,
        keep_support=sampling.keep_support,
        numerics=cfg.numerics,
        impl=cfg.impl,
    )
    routes = jax.tree.map(lambda a: a.transpose(1, 0, 2), routes)
    if route_weights:
      routes = routes._replace(experts=routes.experts.astype(jnp.int16))
    else:
      routes = routes.astype(jnp.int16)
    best = head_ops.likeliest(
        x, w, likeliest, numerics=cfg.numerics, impl=cfg.impl
    )
    found = drawn, logp, routes, best, support[0] if support else None
    if parallel.mesh is not None:
      found = jax.tree.map(lambda a: a[None], found)
    return pool, found

  whole, own = PartitionSpec(), PartitionSpec(mesh.AXES)
  weights = parallel.specs(model.logical_axes(cfg))
  step = parallel.map(step, (weights, own, own, whole, whole), (own, own))
  return nx.jit(step, exact=cfg.exact, donate_argnums=(1,))
