"""Runs sampler and learner over the same tokens and compares what they say.

The sampler's path is the real engine: chunked prefill beside decode, prefix
hits, sequences that join and leave. The learner's path is twofold: packed rows
through the plain forward, which gives figures token by token, and the update
itself, whose gradient program counts what differs from its own forward.

The control arm scores the same tokens with free tiles, XLA's own reductions and
default fusion on both sides (`kernels_pallas.numerics.Numerics(exact=False)`).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from typing import Any, Callable, Iterator, Sequence

import jax
import numpy as np

from agentic_rl import checkpoint as checkpoint_lib
from agentic_rl import setup_run
from agentic_rl import types
from agentic_rl.diagnostics import mismatch
from agentic_rl.diagnostics import mismatch_tokens as tokens_lib
from agentic_rl.diagnostics import policy_matrix
from agentic_rl.diagnostics import traffic
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.parallel import mesh
from agentic_rl.policy import config as policy_config
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import huggingface
from agentic_rl.policy import model
from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib
from kernels_pallas import numerics as nx
from kernels_pallas.logprob_head import ops as head_ops
from kernels_pallas.paged_attention import layout as layouts

LIKELIEST = 8  # tokens of the top-k hit rate
# Sequences are compared in parts of so many tokens, which bounds the memory.
PART_TOKENS = 1 << 16
PHASES = ('rl', 'warm_start')  # the later one first

Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Policy:
  """A policy and what is needed to run it.

  Attributes:
    cfg: its shape.
    weights: its weights.
    config: the config of its run.
    origin: where the weights come from, for people.
    workdir: of its run, if there is one.
    imported: the folder in the format of Hugging Face it was read from, if any.
  """

  cfg: policy_config.PolicyConfig
  weights: Any
  config: Any
  origin: str
  workdir: pathlib.Path | None = None
  imported: pathlib.Path | None = None

  def tokenizer(self) -> tokenizer_lib.Tokenizer | huggingface.Tokenizer:
    """Returns that of its folder, or trains the one its config describes."""
    if self.imported is not None:
      return huggingface.tokenizer(self.imported)
    if self.workdir is not None:
      return tokenizer_lib.Tokenizer.load(self.workdir / 'tokenizer.json')
    return setup_run.train_tokenizer(self.config)


def run_of(folder: str | pathlib.Path) -> pathlib.Path | None:
  """Returns the work directory that holds a checkpoint, if one does.

  Args:
    folder: of the checkpoint; '' for none.
  """
  if not folder:
    return None
  for parent in pathlib.Path(folder).absolute().parents[:3]:
    if (parent / setup_run.RESOLVED).exists():
      return parent
  return None


def load(
    config: Any,
    *,
    workdir: str | pathlib.Path | None = None,
    checkpoint: str | pathlib.Path | None = None,
) -> Policy:
  """Loads a policy; nothing on disk is changed.

  Args:
    config: of the policy's shape; the checkpoint must fit it. Its precision may
      be another one: the weights are rounded to it.
    workdir: of a run: its newest checkpoint is taken, and its vocabulary.
    checkpoint: a folder of checkpoints or one of them, instead. Without either
      the weights are fresh.

  Raises:
    ValueError: a field has no sense, or there is no checkpoint that fits.
  """
  setup_run.check_numbers(config)
  run = pathlib.Path(workdir) if workdir else None
  if checkpoint:
    run = run_of(checkpoint)
  vocab = config.tokenizer.vocab_size
  if run is not None:
    path = run / 'tokenizer.json'
    vocab = tokenizer_lib.Tokenizer.load(path).vocab_size
  fields = {'vocab': vocab, **dict(config.policy.items())}
  cfg = policy_config.make('small', fields)
  step: int | None = None
  if checkpoint:
    folder = pathlib.Path(checkpoint).absolute()
    if folder.name.isdecimal():
      folder, step = folder.parent, int(folder.name)
  elif run is not None:
    folder = _newest(run)
  else:
    weights = model.init(cfg, config.seed)
    return Policy(cfg, weights, config, f'fresh weights, seed {config.seed}')
  shapes = jax.eval_shape(lambda: model.init(cfg, 0))
  try:
    step, weights, _ = checkpoint_lib.read_part(folder, 'weights', shapes, step)
  except checkpoint_lib.CheckpointError as error:
    raise ValueError(str(error)) from error

  def cast(path, value):
    return value if model.is_balance(path) else cfg.numerics.cast(value)

  weights = jax.tree_util.tree_map_with_path(cast, weights)
  return Policy(cfg, weights, config, f'{folder} step {step}', run)


def has_checkpoint(run: str | pathlib.Path) -> bool:
  """Tells whether a folder is a work directory with a checkpoint."""
  return any(_checkpoints(pathlib.Path(run)))


def _checkpoints(run: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the folders that hold checkpoints, the later phase first."""
  for phase in PHASES:
    folder = run / 'checkpoints' / phase
    if folder.is_dir() and any(p.name.isdecimal() for p in folder.iterdir()):
      yield folder


def _newest(run: pathlib.Path) -> pathlib.Path:
  for folder in _checkpoints(run):
    return folder
  raise ValueError(
      f'workdir {run}: no checkpoint in checkpoints/rl or'
      ' checkpoints/warm_start'
  )


# ---------------------------------------------------------------- one arm


@dataclasses.dataclass
class _Part:
  """What an arm found in a part of the sequences."""

  compared: mismatch.Compared
  gradient: dict[str, float]


class _Arm:
  """Sampler and learner of one set of rules.

  Args:
    policy: whose weights both sides use.
    exact: False for the control arm.

  The mesh of the config holds engine and gradient program; the plain forward
  runs on one device, so that it is compared with the mesh, too.
  """

  def __init__(self, policy: Policy, exact: bool):
    config = policy.config
    self.cfg = dataclasses.replace(policy.cfg, exact=exact)
    self.weights, self._seed = policy.weights, config.seed
    sampling = engine_lib.Sampling(**dict(config.sampling.items()))
    if not sampling.temperature > 0:
      raise ValueError('sampling.temperature=0: allowed is a value above 0')
    self.likeliest = min(LIKELIEST, self.cfg.vocab)
    self.parallel = mesh.make(config.get('mesh', ''))
    self._engines = config.rollout.engines
    self._engine_options: dict[str, Any] = dict(
        max_sequences=config.rollout.max_sequences,
        pool_pages=config.rollout.pool_pages,
        sampling=sampling,
        likeliest=self.likeliest,
    )
    self.learner = policy_matrix.make_learner(
        self.cfg,
        config.learner.rows,
        config.learner.row_tokens,
        sampling.temperature,
        self.parallel,
    )
    self._score = _score_program(self.cfg, sampling.temperature, self.likeliest)

  @functools.cached_property
  def _spread(self) -> Any:
    """The weights where the mesh wants them."""
    if self.parallel.mesh is None:
      return self.weights
    logical = model.logical_axes(self.cfg)
    mesh.check(self.parallel, self.weights, logical)
    return jax.device_put(self.weights, self.parallel.shardings(logical))

  @functools.cached_property
  def engine(self) -> engines_lib.Engines:
    """The sampler; a comparison with foreign log-probs makes none."""
    made: engines_lib.Engines
    if self.parallel.mesh is None:
      made = engines_lib.Engines(
          self.cfg, self._seed, engines=self._engines, **self._engine_options
      )
    else:
      made = engines_lib.MeshEngines(
          self.cfg, self._seed, parallel=self.parallel, **self._engine_options
      )
    made.load_params(self._spread, 0)
    return made

  def compare(
      self,
      examples: Sequence[pack_lib.Example],
      likeliest: Sequence[np.ndarray] | None,
      first: int,
  ) -> _Part:
    """Compares what was recorded with both programs of the learner.

    Args:
      examples: with the sampler's log-probs and routes.
      likeliest: int32 [T, k] of each, if known.
      first: number of the first sequence.
    """
    batch = self.learner.pack(examples)
    found = [
        self._rows(part, likeliest)
        for part in pack_lib.microbatches(batch, self.learner.rows)
    ]
    compared = _in_order(found, first, self.cfg)
    stats = self.learner.accumulate(self._spread, batch).stats
    return _Part(compared, stats)

  def _rows(self, part: types.Batch, likeliest) -> dict[str, np.ndarray]:
    """Scores a microbatch; returns columns of what both sides know."""
    inputs = inputs_lib.flatten(part)
    size = part.tokens_BT.size
    places = inputs['rows'][inputs['rows'] < size]
    places = places[inputs['sampled'][places]]
    # One program for every microbatch.
    inputs['rows'] = np.full(size, size, np.int32)
    inputs['rows'][: len(places)] = places
    logp, best, routes = self._score(self.weights, inputs)
    take = lambda a: a.reshape(-1)[places]
    sequences = take(part.segments_BT)
    contexts = take(part.positions_BT) + 1
    out = dict(
        sequences=sequences,
        contexts=contexts,
        sampler=take(part.logp_behavior_BT),
        learner=np.asarray(logp)[: len(places)],
    )
    if likeliest is not None:
      theirs = np.stack([likeliest[s][c] for s, c in zip(sequences, contexts)])
      ours = np.asarray(best)[: len(places)]
      same = theirs[:, :, None] == ours[:, None, :]
      out['hits'] = same.any(-1).mean(-1)
    if part.routes_BTLk is not None and self.cfg.moe_layers:
      recorded = part.routes_BTLk.reshape(size, *part.routes_BTLk.shape[2:])
      real = part.segments_BT.reshape(-1) >= 0
      known = real & (recorded >= 0).any((1, 2))
      theirs, ours = recorded[known], np.asarray(routes).transpose(1, 0, 2)
      differ = (theirs >= 0) & (theirs != ours[known])
      out['route_contexts'] = part.positions_BT.reshape(-1)[known]
      out['flips'] = differ.sum(-1, dtype=np.int16)
    return out


@functools.lru_cache(maxsize=8)
def _score_program(cfg, temperature, likeliest):
  """The learner's plain forward, with its likeliest tokens beside log-probs."""
  score = functools.partial(
      _score, cfg=cfg, temperature=temperature, likeliest=likeliest
  )
  return nx.jit(score, exact=cfg.exact)


def _score(weights, batch, *, cfg, temperature, likeliest):
  layout = layouts.row_layout(batch['positions_BT'], cfg.page)
  hidden, routes, _ = forward_lib.forward(weights, batch['tokens'], layout, cfg)
  take = lambda x: x.at[batch['rows']].get(mode='fill', fill_value=0)
  hidden, w = take(hidden), forward_lib.head(weights, cfg)
  own = dict(numerics=cfg.numerics, impl=cfg.impl)
  support = batch.get('support')
  if support is not None:
    rows = batch['rows']
    support = support.at[rows].get(mode='fill', fill_value=-1)
  logp, _ = head_ops.logprobs(
      hidden,
      w,
      take(batch['targets']),
      support_Tk=support,
      temperature=temperature,
      **own,
  )
  return logp, head_ops.likeliest(hidden, w, likeliest, **own), routes


def _in_order(found, first: int, cfg) -> mismatch.Compared:
  def column(name, empty):
    parts = [f[name] for f in found if name in f]
    return np.concatenate(parts) if parts else empty

  none = np.zeros(0)
  order = np.lexsort((column('contexts', none), column('sequences', none)))
  hits = column('hits', none)
  return mismatch.Compared(
      sequences_P=first + column('sequences', none)[order],
      contexts_P=column('contexts', none)[order],
      sampler_P=column('sampler', none)[order],
      learner_P=column('learner', none)[order],
      hits_P=hits[order] if len(hits) else hits,
      route_contexts_R=column('route_contexts', np.zeros(0, np.int32)),
      flips_RL=column('flips', np.zeros((0, cfg.moe_layers), np.int16)),
      slots=cfg.topk_experts,
  )


# ---------------------------------------------------------------- both arms


def measure(
    policy: Policy,
    source: tokens_lib.Source,
    *,
    control: bool = False,
    note: Note = lambda text: None,
) -> dict[str, Any]:
  """Compares sampler and learner over the tokens of a source.

  Args:
    policy: whose weights both sides use.
    source: the sequences.
    control: also run the arm without invariance, over the same tokens.
    note: told how far it is.

  Returns:
    The report, JSON values (see `mismatch.summary` and the docs of
    `launch/verify.py`).

  Raises:
    ValueError: an option of the policy does not fit, or its log-probs are not
      finite.
  """
  if control and not policy.cfg.exact:
    raise ValueError(
        'control: policy.exact=False is the control arm itself; allowed with'
        ' policy.exact=True'
    )
  began = time.monotonic()
  progress = _Progress(note, source.positions)
  arms = {
      'exact' if policy.cfg.exact else 'policy': _Arm(policy, policy.cfg.exact)
  }
  if control:
    arms['control'] = _Arm(policy, False)
  found: dict[str, list[_Part]] = {name: [] for name in arms}
  done = sequences = 0
  for part in _parts(source.scripts):
    scripts = part
    for name, arm in arms.items():
      progress.begin(f'{name}, sampler', done)
      played = traffic.play(arm.engine, scripts, progress.drawn)
      progress.begin(f'{name}, learner', done)
      found[name].append(
          arm.compare(
              traffic.examples(scripts, played),
              [played[s.rollout_id].likeliest for s in scripts],
              sequences,
          )
      )
      # The control scores the very tokens that were drawn.
      scripts = [tokens_lib.again(s, played[s.rollout_id]) for s in scripts]
    done += sum(sum(s.draws) for s in part)
    sequences += len(part)
  first, *rest = found
  report = _summary(found[first])
  report['policy'] = _describe(policy)
  report['tokens'] = {
      'origin': source.origin,
      'drawn_by_policy': source.drawn,
      'sequences': sequences,
  }
  report['sampler'] = arms[first].engine.counts
  report['seconds'] = round(time.monotonic() - began, 1)
  report['peak_memory_gb'] = round(setup_run.peak_memory_gb(), 2)
  for name in rest:
    report[name] = _summary(found[name])
  return report


class _Progress:
  """Says what is being done, at most every few seconds."""

  EVERY_S = 10.0

  def __init__(self, note: Note, total: int):
    self._note, self._total = note, total
    self._began = self._said = time.monotonic()
    self._what, self._done = '', 0

  def begin(self, what: str, done: int) -> None:
    self._what, self._done = what, done
    self._say(0)

  def drawn(self, count: int) -> None:
    if time.monotonic() - self._said > self.EVERY_S:
      self._say(count)

  def _say(self, count: int) -> None:
    self._said = time.monotonic()
    self._note(
        f'{self._what}: {self._done + count:,} of {self._total:,} positions,'
        f' {self._said - self._began:.0f} s'
    )


def measure_foreign(
    policy: Policy,
    examples: Sequence[pack_lib.Example],
    origin: str,
    *,
    note: Note = lambda text: None,
) -> dict[str, Any]:
  """Compares the log-probs of a foreign engine with the learner's.

  Args:
    policy: the learner's.
    examples: from `mismatch_tokens.read_foreign`.
    origin: where they come from.
    note: told how far it is.

  Returns:
    The report, as of `measure`.

  Raises:
    ValueError: see `measure`.
  """
  began, arm = time.monotonic(), _Arm(policy, policy.cfg.exact)
  found, done = [], 0
  for part in _parts(examples):
    note(f'foreign: {done} of {len(examples)} sequences')
    if any(e.sampled.any() for e in part):
      found.append(arm.compare(part, None, done))
    done += len(part)
  report = _summary(found)
  report['policy'] = _describe(policy)
  report['tokens'] = {
      'origin': origin,
      'drawn_by_policy': False,
      'sequences': len(examples),
  }
  report['seconds'] = round(time.monotonic() - began, 1)
  return report


def _parts(items: Sequence[Any]) -> Iterator[list[Any]]:
  """Cuts scripts or examples into parts of about PART_TOKENS tokens."""
  part: list[Any] = []
  size = 0
  for item in items:
    own = (
        len(item.tokens) if isinstance(item, pack_lib.Example) else item.length
    )
    if part and size + own > PART_TOKENS:
      yield part
      part, size = [], 0
    part.append(item)
    size += own
  if part:
    yield part


def _summary(parts: Sequence[_Part]) -> dict[str, Any]:
  """Joins the parts; the totals are the worse of the learner's programs."""
  out = mismatch.summary(mismatch.join([p.compared for p in parts]))
  add = lambda name: int(sum(p.gradient[name] for p in parts))
  gradient = {
      'positions': add('mismatch/compared'),
      'unequal_bits': add('mismatch/unequal_bits'),
      'route_flips': add('router/flips'),
      'max_abs_dlogp': max(p.gradient['mismatch/max_abs_dlogp'] for p in parts),
  }
  if gradient['positions'] != out['positions']:
    raise ValueError(
        f'the gradient program compared {gradient["positions"]} positions, the'
        f' forward {out["positions"]}: they must be the same'
    )
  for name in ('unequal_bits', 'route_flips', 'max_abs_dlogp'):
    out[name] = max(out[name], gradient[name])
  out['verdict'] = mismatch.verdict(
      out['unequal_bits'], out['route_flips'], out['slope']
  )
  return {**out, 'gradient': gradient}


def _describe(policy: Policy) -> dict[str, Any]:
  cfg = policy.cfg
  names = (
      'precision', 'exact', 'impl', 'layers', 'width', 'experts', 'pattern',
      'max_context', 'vocab',
  )  # fmt: skip
  mesh_ = policy.config.get('mesh', '')
  return {
      'origin': policy.origin,
      'sha256': checkpoint_lib.params_sha256(policy.weights),
      'platform': nx.platform(),
      'mesh': mesh_,
      'temperature': policy.config.sampling.temperature,
      **{name: getattr(cfg, name) for name in names},
  }


def holds(report: dict[str, Any], foreign: bool) -> bool:
  """Tells whether a report is what was asked for.

  An exact policy must be exact; with an inexact one, and against a foreign
  engine, the error must not accumulate.
  """
  if report['policy']['exact'] and not foreign:
    return report['verdict'] == 'exact'
  return report['verdict'] != 'accumulating'
