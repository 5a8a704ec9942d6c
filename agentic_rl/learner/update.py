"""The update: gradients over microbatches, then one optimizer step.

The gradient program runs the same forward as the sampler. It compares, token by
token, the log-probs and routes it finds with those that were recorded when the
tokens were drawn, so a mismatch is seen in the step in which it happens.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from concurrent import futures
from typing import Any, Mapping, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from agentic_rl import types
from agentic_rl.learner import corrections
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import losses
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.parallel import mesh
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from agentic_rl.policy import routing
from agentic_rl.policy.config import PolicyConfig
from kernels_pallas import numerics as nx
from kernels_pallas.logprob_head import ops as head_ops

# Microbatches are added up in so many chains side by side: one program of small
# operations does not fill two cores.
CHAINS = 2


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """What is minimised; static in the gradient program.

  Attributes:
    name: key of `LOSSES`.
    options: keyword options of that loss, as sorted pairs.
    temperature: of the log-probs, that of the sampler.
    entropy: weight of the entropy bonus.
    reference_kl: weight of the KL to the reference policy, estimator k3:
      KL ≈ e^(log π_ref - log π) - (log π_ref - log π) - 1
      (Source: arXiv:2402.03300 eq. 4).
    balance: step of the routers' balance bias against the load
      (Source: arXiv:2408.15664 alg. 1); 0 leaves it.
    anchor: what the ratio of the loss is taken to: 'behavior', the recorded
      log-prob, or 'learner', the learner's own before the update, which leaves
      a mismatch of the two to the correction.
    correction: key of `corrections.CORRECTIONS`.
    correction_options: keyword options of it, as sorted pairs.
    routing_replay: what of the recorded routes the forward takes over, see
      `routing.MODES`.

  Raises:
    ValueError: on an unknown loss or option, or a value outside its range.
  """

  name: str = 'ppo_clip'
  options: tuple[tuple[str, Any], ...] = ()
  temperature: float = 1.0
  entropy: float = 0.0
  reference_kl: float = 0.0
  balance: float = 0.0
  anchor: str = 'behavior'
  correction: str = 'none'
  correction_options: tuple[tuple[str, Any], ...] = ()
  routing_replay: str = 'none'

  def __post_init__(self):
    options = dict(self.correction_options)
    corrections.check(self.correction, options, self.anchor)
    routing.check(self.routing_replay)
    if self.name not in losses.LOSSES:
      raise ValueError(
          f'loss {self.name!r}: allowed are {sorted(losses.LOSSES)}'
      )
    known = inspect.signature(losses.LOSSES[self.name]).parameters.values()
    names = [p.name for p in known if p.kind is p.KEYWORD_ONLY]
    for name, _ in self.options:
      if name not in names:
        raise ValueError(
            f'option {name!r} of loss {self.name!r}: allowed are {names}'
        )
    for field in ('entropy', 'reference_kl', 'balance'):
      if not getattr(self, field) >= 0:
        raise ValueError(f'{field}={getattr(self, field)}: must be 0 or above')


class DivergedError(RuntimeError):
  """The gradient is not finite."""


def check_finite(stats: Mapping[str, float], where: str) -> None:
  """Raises DivergedError unless loss and gradient of an update are finite.

  Args:
    stats: from `Learner.update`, or from `Learner.accumulate`, which has no
      norm yet.
    where: for the message.
  """
  for name in ('loss', 'grad_norm'):
    if not np.isfinite(stats.get(name, 0.0)):
      raise DivergedError(
          f'{where}: {name} is {stats[name]}; a smaller learning rate may help'
          ' (the last checkpoint is kept)'
      )


class Learner:
  """Holds the optimizer and the compiled programs; the state is the caller's.

  Args:
    cfg: shape of the policy.
    loss: what is minimised.
    optimizer: from `optimizer.make`.
    rows: rows of a microbatch; on a mesh the next number that gives every
      device whole row tiles.
    row_tokens: tokens of a row, a multiple of the page.
    parallel: the mesh.

  Raises:
    ValueError: if a row is no multiple of the page or shorter than the context,
      or its parts on the mesh are no whole pages.
  """

  def __init__(
      self,
      cfg: PolicyConfig,
      loss: LossConfig,
      optimizer: optax.GradientTransformation,
      *,
      rows: int,
      row_tokens: int,
      parallel: mesh.Parallel = mesh.SINGLE,
  ):
    parts = parallel.size('context')
    if row_tokens % (cfg.page * parts):
      raise ValueError(
          f'row_tokens={row_tokens}: a multiple of page={cfg.page} times the'
          f" mesh's context={parts} is needed"
      )
    if parallel.mesh is not None:
      rows = inputs_lib.mesh_rows(rows, row_tokens, parallel)
    if row_tokens * rows % nx.ROW_TILE:
      raise ValueError(
          f'rows={rows} of row_tokens={row_tokens}: a microbatch must be whole'
          f' tiles of {nx.ROW_TILE}'
      )
    if row_tokens * rows >= 1 << 31:
      raise ValueError(
          f'rows={rows} of row_tokens={row_tokens}: a microbatch must have fewer'
          ' than 2^31 tokens'
      )
    if row_tokens < cfg.max_context:
      raise ValueError(
          f'row_tokens={row_tokens}: a sequence of'
          f' max_context={cfg.max_context} must fit a row'
      )
    self.cfg, self.loss, self.optimizer = cfg, loss, optimizer
    self.rows, self.row_tokens = rows, row_tokens
    self.parallel = parallel
    logical = model.logical_axes(cfg)
    self._shardings = parallel.shardings(logical)
    specs, whole = parallel.specs(logical), PartitionSpec()
    sums = Sums(specs, whole, whole)
    own = PartitionSpec(mesh.AXES)
    self._accumulate = nx.jit(
        parallel.map(
            functools.partial(
                _accumulate, cfg=cfg, loss=loss, parallel=parallel
            ),
            (specs, specs if loss.reference_kl else whole, sums, own, whole),
            sums,
        ),
        exact=cfg.exact,
        donate_argnums=(2,),
    )
    everywhere = parallel.replicated()
    self._zeros = jax.jit(
        functools.partial(Sums.zeros, cfg),
        out_shardings=Sums(self._shardings, everywhere, everywhere),
    )
    # Two programs that talk across devices must not run at once.
    self._chains = CHAINS if parallel.mesh is None else 1
    self._threads = futures.ThreadPoolExecutor(self._chains)
    self._apply = nx.jit(
        functools.partial(_apply, cfg=cfg, loss=loss, optimizer=optimizer),
        exact=cfg.exact,
        donate_argnums=(0, 1),
        out_shardings=(self._shardings, self._state_shardings(), None, None),
    )

  def init(self, weights) -> Any:
    """Returns the optimizer state of fresh weights."""
    return jax.jit(self.optimizer.init, out_shardings=self._state_shardings())(
        weights
    )

  def _state_shardings(self) -> Any:
    if self.parallel.mesh is None:
      return None
    return optimizer_lib.state_shardings(
        self.optimizer,
        jax.eval_shape(lambda: model.init(self.cfg, 0)),
        self._shardings,
        self.parallel.replicated(),
    )

  def pack(self, examples) -> types.Batch:
    """Packs examples into rows of this learner's size."""
    return pack_lib.pack(
        examples,
        row_tokens=self.row_tokens,
        page=self.cfg.page,
        rows=self.rows,
    )

  def update(self, weights, state, batch: types.Batch, reference=None):
    """Takes one optimizer step on a batch: `accumulate`, then `apply`.

    Args:
      weights: of the policy; donated.
      state: of the optimizer; donated.
      batch: from `pack`.
      reference: weights of the reference policy, if `reference_kl` is used.

    Returns:
      New weights, new state and a dict of float metrics.

    Raises:
      ValueError: if the batch trains no token, or the reference is missing.
    """
    found = self.accumulate(weights, batch, reference)
    return self.apply(weights, state, found)

  def accumulate(self, weights, batch: types.Batch, reference=None) -> Found:
    """Computes the gradient of a batch and what the batch shows; changes nothing.

    Args:
      weights: of the policy; kept.
      batch: from `pack`.
      reference: weights of the reference policy, if `reference_kl` is used.

    Returns:
      The gradient and the metrics, to look at before `apply`.

    Raises:
      ValueError: if the batch trains no token, or the reference is missing.
    """
    total = float(batch.weights_BT.sum())
    if total <= 0:
      raise ValueError('the batch holds no trained token')
    if self.loss.reference_kl and reference is None:
      raise ValueError('reference_kl needs the weights of the reference')
    if not self.loss.reference_kl:
      reference = None
    if self.loss.routing_replay != 'none':
      routing.check_recorded(
          batch.routes_BTLk, self.loss.routing_replay, self.cfg
      )
    parts = list(pack_lib.microbatches(batch, self.rows))
    scale = np.float32(1 / total)

    def chain(own) -> Sums:
      sums = self._zeros(weights)
      for part in own:
        inputs = inputs_lib.flatten(part, self.parallel)
        sums = self._accumulate(weights, reference, sums, inputs, scale)
      return jax.block_until_ready(sums)

    n = self._chains
    # Which microbatch belongs to which chain is fixed, and so are the bits.
    chains = [own for i in range(n) if (own := parts[i::n])]
    sums = list(self._threads.map(chain, chains))
    return Found(sums, _metrics(sums, total))

  def apply(self, weights, state, found: Found):
    """Takes the optimizer step of a gradient.

    Args:
      weights: those that the gradient was computed at; donated.
      state: of the optimizer; donated.
      found: from `accumulate`.

    Returns:
      New weights, new state and the metrics, now with `grad_norm`.
    """
    weights, state, _, norm = self._apply(weights, state, found.sums)
    return weights, state, {**found.stats, 'grad_norm': float(norm)}


class Found(NamedTuple):
  """What a batch shows and would change.

  Attributes:
    sums: gradient and counts of each chain.
    stats: float metrics of the batch.
  """

  sums: list[Sums]
  stats: dict[str, float]


class Sums(NamedTuple):
  """What microbatches add up: gradients and counts."""

  grads: Any
  scalars: dict[str, jax.Array]
  load_LE: jax.Array

  @classmethod
  def zeros(cls, cfg: PolicyConfig, weights) -> Sums:
    """Returns empty sums for these weights."""
    names = (
        'loss', 'entropy', 'clipped', 'kl_reference', 'unequal', 'compared',
        'flips', 'routed', 'max_abs_dlogp', 'max_abs_ratio_dev', 'outside',
        'tokens', *corrections.COUNTS,
    )  # fmt: skip
    scalars = {name: jnp.zeros(()) for name in names}
    load = jnp.zeros((cfg.moe_layers, max(cfg.experts, 1)))
    return cls(jax.tree.map(jnp.zeros_like, weights), scalars, load)


def _logprobs(
    weights, hidden, targets, cfg, temperature, parallel, support=None
):
  return head_ops.logprobs(
      hidden,
      forward_lib.head(weights, cfg, parallel),
      targets,
      support_Tk=support,
      temperature=temperature,
      numerics=cfg.numerics,
      impl=cfg.impl,
  )


def policy_logprobs(
    weights,
    batch,
    cfg: PolicyConfig,
    temperature: float,
    parallel: mesh.Parallel = mesh.SINGLE,
    replay: str = 'none',
):
  """Runs the forward on packed rows and takes the log-probs of the targets.

  Args:
    weights: of the policy.
    batch: a dict from `inputs.flatten`; only tokens, targets, positions and
      rows, and the support where it was recorded.
    cfg: shape of the policy.
    temperature: of the log-probs.
    parallel: the mesh; then weights and batch are this device's.
    replay: what of the batch's routes is taken over, see `routing.MODES`.

  Returns:
    float32 log-probs and entropies [R] of the places `batch['rows']`, and the
    routes int32 [L_moe, T, topk] that the routers choose.
  """
  layout = forward_lib.row_layouts(batch['positions_BT'], cfg, parallel)
  hidden, routes, _ = forward_lib.forward(
      weights,
      batch['tokens'],
      layout,
      cfg,
      parallel=parallel,
      replay=routing.recorded(batch, replay),
  )
  rows = batch['rows']
  hidden = _take(hidden, rows)
  targets = _take(batch['targets'], rows)
  support = batch.get('support')
  if support is not None:
    support = support.at[rows].get(mode='fill', fill_value=-1)
  logp, entropy = _logprobs(
      weights, hidden, targets, cfg, temperature, parallel, support
  )
  return logp, entropy, routes


@jax.custom_vjp
def _take(x, rows):
  return x.at[rows].get(mode='fill', fill_value=0)


def _take_backward(saved, g):
  # Rows are distinct, so the transpose is a plain write in any order.
  shape, rows = saved
  out = jnp.zeros((shape, *g.shape[1:]), g.dtype)
  return out.at[rows].set(g, mode='drop', unique_indices=True), None


_take.defvjp(
    lambda x, rows: (_take(x, rows), (x.shape[0], rows)), _take_backward
)


def _accumulate(weights, reference, sums, batch, scale, *, cfg, loss, parallel):
  """Adds one microbatch's gradient and counts to the sums."""
  if parallel.mesh is not None:
    batch = jax.tree.map(lambda a: a[0], batch)
  reference_logp = None
  if reference is not None:
    reference_logp, _, _ = policy_logprobs(
        reference, batch, cfg, loss.temperature, parallel
    )
    reference_logp = lax.stop_gradient(reference_logp)
  (_, aux), grads = jax.value_and_grad(_objective, has_aux=True)(
      weights, batch, reference_logp, scale, cfg, loss, parallel
  )
  return _join(sums, _over_devices(Sums(grads, *aux), cfg, parallel))


def _over_devices(own: Sums, cfg, parallel) -> Sums:
  scalars = {
      k: parallel.max(v) if k.startswith('max') else parallel.sum(v)
      for k, v in own.scalars.items()
  }
  grads = parallel.sum_gradients(own.grads, model.logical_axes(cfg))
  return Sums(grads, scalars, parallel.sum(own.load_LE))


def _join(a: Sums, b: Sums) -> Sums:
  scalars = {
      k: jnp.maximum(v, b.scalars[k])
      if k.startswith('max')
      else v + b.scalars[k]
      for k, v in a.scalars.items()
  }
  grads = jax.tree.map(jnp.add, a.grads, b.grads)
  return Sums(grads, scalars, a.load_LE + b.load_LE)


def _objective(weights, batch, reference_logp, scale, cfg, loss, parallel):
  logp, entropy, routes = policy_logprobs(
      weights, batch, cfg, loss.temperature, parallel, loss.routing_replay
  )
  rows = batch['rows']
  take = lambda name: batch[name].at[rows].get(mode='fill', fill_value=0)
  w, recorded, drawn = take('weights'), take('logp_behavior'), take('sampled')
  sums = functools.partial(
      corrections.sequence_sums,
      sequence_R=batch['sequence'],
      count=batch['tokens'].size * parallel.size('context'),
      parallel=parallel,
  )
  per_token, clipped, counts = token_loss(
      loss, logp, recorded, take('advantages'), w, drawn, sums
  )
  kl = jnp.zeros_like(logp)
  if reference_logp is not None:
    gap = reference_logp - logp
    kl = jnp.exp(gap) - gap - 1
  total = per_token - loss.entropy * entropy + loss.reference_kl * kl
  value = (w * total).sum() * scale
  stats = {
      'loss': (w * per_token).sum(),
      'entropy': (w * entropy).sum(),
      'clipped': (w * clipped).sum(),
      'kl_reference': (w * kl).sum(),
      **_mismatch(logp, recorded, drawn),
      **_flips(routes, batch),
      'tokens': batch['real'].sum().astype(jnp.float32),
      **counts,
  }
  stats = jax.tree.map(lax.stop_gradient, stats)
  return value, (stats, _load(routes, batch['real'], cfg))


def token_loss(loss, logp, recorded, advantages, weights, drawn, sums):
  """The loss of each token, corrected where another policy drew it.

  Args:
    loss: a `LossConfig`.
    logp: float32 [R], under the policy that learns.
    recorded: float32 [R], under the policy that drew.
    advantages: float32 [R].
    weights: float32 [R], loss weight of the token.
    drawn: bool [R], whether a policy drew it.
    sums: [R] -> [R], in every row the sum over the rows of its sequence, see
      `corrections.sequence_sums`.

  Returns:
    float32 [R] loss, float32 [R] 1 where it was clipped, and sums of what the
    correction did.
  """
  fun = functools.partial(losses.LOSSES[loss.name], **dict(loss.options))
  anchor = lax.stop_gradient(logp) if loss.anchor == 'learner' else recorded
  per_token, clipped = fun(logp, anchor, advantages)
  if loss.correction == 'none':
    return per_token, clipped, dict.fromkeys(corrections.COUNTS, jnp.zeros(()))
  options = dict(loss.correction_options)
  factor, truncated = corrections.weigh(
      loss.correction, options, logp, recorded, drawn, sums
  )
  counts = corrections.stats(factor, truncated, drawn & (weights > 0))
  return factor * per_token, clipped, counts


def _mismatch(logp, recorded, drawn):
  """Compares log-probs bit for bit where the policy drew the token."""
  bits = lambda a: lax.bitcast_convert_type(a, jnp.int32)
  gap = jnp.where(drawn, jnp.abs(logp - recorded), 0.0)
  ratio = jnp.where(drawn, jnp.exp(logp - recorded), 1.0)
  return {
      'unequal': (drawn & (bits(logp) != bits(recorded))).sum().astype(nx.F32),
      'compared': drawn.sum().astype(nx.F32),
      'max_abs_dlogp': gap.max(),
      'max_abs_ratio_dev': jnp.abs(ratio - 1).max(),
      'outside': ((ratio < 0.9) | (ratio > 1.1)).sum().astype(nx.F32),
  }


def _flips(routes_LTk, batch):
  if 'routes' not in batch or not routes_LTk.size:
    return {'flips': jnp.zeros(()), 'routed': jnp.zeros(())}
  recorded = batch['routes'].transpose(1, 0, 2)
  known = recorded >= 0
  flipped = known & (recorded != routes_LTk.astype(recorded.dtype))
  return {
      'flips': flipped.sum().astype(nx.F32),
      'routed': known.sum().astype(nx.F32),
  }


def _load(routes_LTk, real_T, cfg):
  """Returns float32 [L_moe, E], real tokens sent to each expert."""
  if not cfg.moe_layers:
    return jnp.zeros((0, 1))
  hit = routes_LTk[..., None] == jnp.arange(cfg.experts)
  return (hit & real_T[:, None, None]).sum((1, 2)).astype(nx.F32)


def _apply(weights, state, sums, *, cfg, loss, optimizer):
  sums = functools.reduce(_join, sums)
  norm = optax.tree.norm(sums.grads)
  updates, state = optimizer.update(sums.grads, state, weights)
  new = optax.apply_updates(weights, updates)
  cast = cfg.numerics.cast

  def leaf(path, value):
    return value if model.is_balance(path) else cast(value)

  new = jax.tree_util.tree_map_with_path(leaf, new)
  if loss.balance and cfg.moe_layers:
    new = _balance(new, sums.load_LE, loss.balance, cfg)
  return new, state, sums, norm


def _balance(weights, load_LE, rate, cfg):
  """Moves each router's bias by `rate` against the sign of its load."""
  excess = load_LE - load_LE.mean(-1, keepdims=True)
  step = -rate * jnp.sign(excess)
  n = len(cfg.pattern)
  step = step.reshape(cfg.groups, n, cfg.experts)
  pattern = {
      i: {**w, 'balance': w['balance'] + step[:, i]}
      for i, w in weights['pattern'].items()
  }
  return {**weights, 'pattern': pattern}


def _metrics(sums: list[Sums], total: float) -> dict[str, float]:
  counts = jax.device_get([Sums({}, c.scalars, c.load_LE) for c in sums])
  joined = functools.reduce(_join, counts)
  s = {k: float(v) for k, v in joined.scalars.items()}
  load = np.asarray(joined.load_LE)
  out = {
      'loss': s['loss'] / total,
      'entropy': s['entropy'] / total,
      'clip_share': s['clipped'] / total,
      'kl_reference': s['kl_reference'] / total,
      'trained_tokens': total,
      'learner_tokens': s['tokens'],
      'mismatch/unequal_bits': s['unequal'],
      'mismatch/compared': s['compared'],
      'mismatch/max_abs_dlogp': s['max_abs_dlogp'],
      'mismatch/max_abs_ratio_dev': s['max_abs_ratio_dev'],
      # Share of the drawn tokens whose ratio is outside [0.9, 1.1].
      'mismatch/outside_share': s['outside'] / max(1.0, s['compared']),
      'router/flips': s['flips'],
      'router/flip_rate': s['flips'] / max(1.0, s['routed']),
      **corrections.metrics(s),
  }
  if load.size:
    mean = load.mean(-1, keepdims=True).clip(1e-9)
    out['router/compared'] = s['routed']
    out['router/max_load'] = float((load / mean).max())
  return out
