"""The exactness matrix of a policy: one recording, every way to make it again.

Random traffic (`traffic`) is sampled once, by an engine that holds all of its
sequences at a time. Then

- other engines sample it again: one sequence at a time, a few, with small and
  large steps, in another order, with few pages, from known prefixes, on other
  meshes. Tokens, log-probs and experts must be those of the recording;
- prompts go on from the middle of what was drawn: an engine that knows the
  pages and one that does not must draw alike;
- the learner computes it: by its plain forward and by its gradient program, in
  rows and microbatches of several sizes, with and without remat, on other
  meshes. Log-probs and experts must be those recorded.

Nothing may differ in a bit.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import jax
import numpy as np

from agentic_rl import numerics as bits
from agentic_rl.diagnostics import mismatch_tokens
from agentic_rl.diagnostics import text_table
from agentic_rl.diagnostics import traffic
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.parallel import mesh
from agentic_rl.policy import model
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib
from kernels_pallas import numerics as nx

MESHES = ('data=8', 'data=2,expert=4', 'fsdp=8', 'context=8')
AT_ONCE = 256  # sequences of the recording
LEAST = 16  # and at least so many, so that pages are shared and evicted
# Of this share of the sequences the slow engines are made to sample.
FEW = 8

Note = Callable[[str], None]
Examples = Sequence[pack_lib.Example]


class Counts(NamedTuple):
  """What a comparison found.

  Attributes:
    positions: drawn tokens that were compared.
    unequal_bits: of their log-probs, how many differ in a bit.
    route_flips: experts that differ, over layers, tokens and slots.
    unequal_tokens: tokens that differ; 0 for a learner, which draws none.
    kv_hits: pages of known prefixes that the sampler took over.
  """

  positions: int
  unequal_bits: int
  route_flips: int
  unequal_tokens: int = 0
  kv_hits: int = 0

  @property
  def exact(self) -> bool:
    """Whether nothing differs."""
    return not (self.unequal_bits or self.route_flips or self.unequal_tokens)

  @classmethod
  def total(cls, counts: Iterable[Counts]) -> Counts:
    """Returns the sums of some."""
    return cls(*map(sum, zip(cls(0, 0, 0), *counts)))


@dataclasses.dataclass(frozen=True)
class Arm:
  """A row of the matrix.

  Attributes:
    side: 'sampler', 'forward' or 'gradient', the last two of the learner.
    name: how it differs.
    measure: does it.
  """

  side: str
  name: str
  measure: Callable[[], Counts]


# ---------------------------------------------------------------- two sides


@functools.lru_cache(maxsize=8)
def make_learner(
    cfg: PolicyConfig,
    rows: int,
    row_tokens: int,
    temperature: float = 1.0,
    parallel: mesh.Parallel = mesh.SINGLE,
) -> update.Learner:
  """Returns a learner that is only compared.

  Args:
    cfg: shape of the policy.
    rows: of a microbatch.
    row_tokens: of a row.
    temperature: of the log-probs.
    parallel: the mesh.

  Raises:
    ValueError: see `update.Learner`.
  """
  return update.Learner(
      cfg,
      update.LossConfig(temperature=temperature),
      optimizer_lib.make('adam', learning_rate=1e-4, steps=1),
      rows=rows,
      row_tokens=row_tokens,
      parallel=parallel,
  )


def by_gradient(learner: update.Learner, weights, examples: Examples) -> Counts:
  """Compares what was recorded with what the gradient program finds."""
  stats = learner.accumulate(weights, learner.pack(examples)).stats
  return Counts(
      int(stats['mismatch/compared']),
      int(stats['mismatch/unequal_bits']),
      int(stats['router/flips']),
  )


def by_forward(learner: update.Learner, weights, examples: Examples) -> Counts:
  """Compares what was recorded with the plain forward, on one device."""
  program = _forward_program(learner.cfg, learner.loss.temperature)
  found = []
  for part in pack_lib.microbatches(learner.pack(examples), learner.rows):
    inputs = inputs_lib.flatten(part)
    logp, _, routes = program(weights, inputs)
    places = inputs['rows'][inputs['rows'] < inputs['tokens'].size]
    drawn = inputs['sampled'][places]
    recorded = inputs['logp_behavior'][places][drawn]
    ours = np.asarray(logp)[: len(places)][drawn]
    flips = 0
    if 'routes' in inputs:
      known = inputs['routes'] >= 0
      experts = np.asarray(routes).transpose(1, 0, 2)
      flips = int((known & (experts != inputs['routes'])).sum())
    found.append(Counts(len(ours), bits.unequal_bits(ours, recorded), flips))
  return Counts.total(found)


@functools.lru_cache(maxsize=8)
def _forward_program(cfg: PolicyConfig, temperature: float):
  run = functools.partial(
      update.policy_logprobs, cfg=cfg, temperature=temperature
  )
  return nx.jit(run, exact=cfg.exact)


def by_sampler(
    played: Mapping[int, traffic.Played],
    recorded: Mapping[int, traffic.Played],
    kv_hits: int = 0,
) -> Counts:
  """Compares two recordings of the same scripts, those of the first."""
  found = []
  for name, ours in played.items():
    theirs, at = recorded[name], ours.sampled
    found.append(
        Counts(
            int(at.sum()),
            bits.unequal_bits(ours.logp[at], theirs.logp[at]),
            int((ours.routes != theirs.routes).sum()),
            int((ours.tokens != theirs.tokens).sum()),
        )
    )
  return Counts.total(found)._replace(kv_hits=kv_hits)


def branches(
    scripts: Sequence[traffic.Script],
    played: Mapping[int, traffic.Played],
    cfg: PolicyConfig,
    first_id: int,
) -> list[traffic.Script]:
  """Returns scripts whose prompts are the first two thirds of what was drawn.

  Args:
    scripts: that were played.
    played: what came of them.
    cfg: for the context and the page.
    first_id: rollout id of the first; the others follow.
  """
  out: list[traffic.Script] = []
  for script in scripts:
    item = played[script.rollout_id]
    drawn = np.flatnonzero(item.sampled)
    cut = int(drawn[2 * len(drawn) // 3]) + 1
    room = cfg.max_context - cut
    if room > 1:
      prompt = tuple(item.tokens[:cut].tolist())
      draws = (min(2 * cfg.page, room - 1),)
      out.append(traffic.Script(first_id + len(out), prompt, draws))
  return out


# ---------------------------------------------------------------- the matrix


class _Matrix:
  """The recording and what the arms need."""

  def __init__(self, cfg, weights, sampling, seed, positions):
    self.cfg, self.weights, self.sampling = cfg, weights, sampling
    self.seed = seed
    source = mismatch_tokens.from_traffic(cfg, positions, seed, LEAST)
    self.scripts = source.scripts
    few = max(LEAST // 2, len(self.scripts) // FEW)
    self.few = self.scripts[:few]
    self.recorded = traffic.play(self.engine(AT_ONCE), self.scripts)
    if not all(np.isfinite(p.logp).all() for p in self.recorded.values()):
      raise ValueError('the log-probs of the policy are not finite numbers')
    examples = traffic.examples(self.scripts, self.recorded)
    order = np.random.default_rng(seed).permutation(len(examples))
    self.examples, self.shuffled = examples, [examples[i] for i in order]

  def engine(self, max_sequences: int, pages: int = 0) -> engine_lib.Engine:
    made = engine_lib.Engine(
        self.cfg,
        self.seed,
        max_sequences=max_sequences,
        pool_pages=pages,
        sampling=self.sampling,
    )
    made.load_params(self.weights, 0)
    return made

  def again(self, scripts, engine, recorded=None) -> Counts:
    """Plays scripts and compares them with a recording, else with the first."""
    before = engine.counts['kv_hits']
    played = traffic.play(engine, scripts)
    hits = engine.counts['kv_hits'] - before
    return by_sampler(played, recorded or self.recorded, hits)

  # --- arms ---

  def arms(self) -> list[Arm]:
    few, every = self.few, self.scripts
    pages = self.cfg.pages_per_sequence

    def engine(name, scripts, count, room=0):
      return Arm(
          'sampler',
          name,
          lambda: self.again(scripts, self.engine(count, room * pages)),
      )

    return [
        engine('1 sequence at a time', few, 1),
        engine('8, pages evicted', every[: 4 * len(few)], 8, 3),
        engine('64, in reverse', every[::-1], 64),
        Arm('sampler', 'prefixes known', self._known),
        Arm('sampler', 'branches, known and not', self._branches),
        self._learned('forward', 1, 1, False),
        self._learned('forward', 6, 2, True),
        self._learned('gradient', 2, 1, True),
        self._learned('gradient', 8, 2, False),
    ]

  def _known(self) -> Counts:
    """Each sequence twice on one engine: the second time it knows the pages."""
    engine = self.engine(8)
    traffic.play(engine, self.few)
    return self.again(self.few, engine)

  def _branches(self) -> Counts:
    engine = self.engine(8)
    traffic.play(engine, self.few)
    grown = branches(self.few, self.recorded, self.cfg, len(self.scripts))
    fresh = traffic.play(self.engine(len(grown)), grown)
    return self.again(grown, engine, fresh)

  def _learned(self, side, rows, contexts, other_remat) -> Arm:
    cfg = dataclasses.replace(self.cfg, remat=self.cfg.remat != other_remat)
    length = contexts * cfg.max_context
    rows = inputs_lib.mesh_rows(rows, length, mesh.SINGLE)
    check = by_forward if side == 'forward' else by_gradient

    def measure():
      learner = make_learner(cfg, rows, length, self.sampling.temperature)
      return check(learner, self.weights, self.shuffled)

    remat = ', remat' if cfg.remat else ''
    return Arm(side, f'{rows} x {length} tokens{remat}', measure)

  def mesh_arms(self, text: str) -> list[Arm]:
    parallel = mesh.make(text)
    logical = model.logical_axes(self.cfg)
    spread = lambda: jax.device_put(self.weights, parallel.shardings(logical))

    def sampler():
      engine = engines_lib.MeshEngines(
          self.cfg,
          self.seed,
          parallel=parallel,
          max_sequences=2 * parallel.size(),
          sampling=self.sampling,
      )
      engine.load_params(spread(), 0)
      return self.again(self.few, engine)

    learner = make_learner(
        self.cfg,
        8,
        self.cfg.max_context,
        self.sampling.temperature,
        parallel,
    )

    def gradient():
      return by_gradient(learner, spread(), self.examples)

    return [Arm('sampler', text, sampler), Arm('gradient', text, gradient)]


def fitting(cfg: PolicyConfig, meshes: Sequence[str]) -> list[str]:
  """Returns those meshes that there are devices for and that fit a policy."""
  out = []
  for text in meshes:
    try:
      _check_mesh(cfg, text)
    except ValueError:
      continue
    out.append(text)
  return out


def _check_mesh(cfg: PolicyConfig, text: str) -> None:
  parallel = mesh.make(text)
  if parallel.mesh is None:
    raise ValueError(f'mesh={text!r} is one device: two or more are needed')
  shapes = jax.eval_shape(lambda: model.init(cfg, 0))
  mesh.check(parallel, shapes, model.logical_axes(cfg))
  make_learner(cfg, 8, cfg.max_context, parallel=parallel)


def measure(
    cfg: PolicyConfig,
    weights: Any,
    *,
    sampling: engine_lib.Sampling,
    positions: int = 10_000,
    meshes: Sequence[str] = (),
    seed: int = 0,
    note: Note = lambda text: None,
) -> dict[str, Any]:
  """Fills the matrix of a policy.

  Args:
    cfg: its shape.
    weights: of the policy, on one device.
    sampling: how tokens are drawn.
    positions: drawn tokens of the recording, at least.
    meshes: to sample and to learn on, too, as for `mesh.parse`.
    seed: of traffic and draws.
    note: told what is being measured.

  Returns:
    The report, JSON values: `recorded`, the drawn tokens of the recording;
    the fields of `Counts`, over all arms; `arms`, the same of each, with its
    `side`, `arm` and `seconds`; `exact`, whether nothing differs.

  Raises:
    ValueError: a value does not fit the policy or the machine, or the policy
      gives no finite log-probs.
  """
  if not sampling.temperature > 0:
    raise ValueError('sampling.temperature=0: allowed is a value above 0')
  for text in meshes:
    _check_mesh(cfg, text)
  began = time.monotonic()
  note(f'recording {positions:,} positions')
  matrix = _Matrix(cfg, weights, sampling, seed, positions)
  arms = matrix.arms()
  for text in meshes:
    arms += matrix.mesh_arms(text)
  rows, found = [], []
  for number, arm in enumerate(arms, 1):
    note(f'{number} of {len(arms)}: {arm.side}, {arm.name}')
    start = time.monotonic()
    found.append(arm.measure())
    seconds = round(time.monotonic() - start, 1)
    rows.append(
        dict(
            side=arm.side, arm=arm.name, **found[-1]._asdict(), seconds=seconds
        )
    )
  total = Counts.total(found)
  return {
      'recorded': sum(sum(s.draws) for s in matrix.scripts),
      **total._asdict(),
      'exact': total.exact,
      'arms': rows,
      'seconds': round(time.monotonic() - began, 1),
  }


def table(report: Mapping[str, Any]) -> str:
  """Returns the report as text."""
  names = Counts._fields
  rows = [['side', 'arm', *names]]
  whole = {'side': 'all', 'arm': ''} | dict(report)
  for row in (*report['arms'], whole):
    rows.append([row['side'], row['arm'], *(f'{row[n]:,}' for n in names)])
  out = text_table.lines(rows, left=2)
  out.append('exact' if report['exact'] else 'NOT exact')
  return '\n'.join(out)
