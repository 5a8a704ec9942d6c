"""Two precisions of one policy over the same tokens of long rollouts.

Arm a draws the rollouts through the engine. Then the learner's forward reads
them in both precisions, with the same weights, which tells how far the arms are
from each other, token by token:

  kl      KL(a || b) = Σ_v p_a(v) (log p_a(v) - log p_b(v)), over the whole
          vocabulary
  dlogp   |log p_a - log p_b| of the tokens that were drawn
  top1    share of places where both find the same token the likeliest
  slots   share of a token's routes whose expert differs, slot by slot
  experts share of the experts chosen by a that b does not choose

And each precision is compared with itself: what its engine recorded with what
its learner finds. There no bit may differ. Arm b reads most of a's rollouts as
prompts for that and draws the rest itself.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from agentic_rl import numerics as bits
from agentic_rl.diagnostics import traffic
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import engine as engine_lib
from kernels_pallas import numerics as nx
from kernels_pallas.logprob_head import ops as head_ops
from kernels_pallas.paged_attention import layout as layouts

PROMPT = 16  # random tokens that open a rollout
FIRST_EDGE = 64  # end of the first bucket; each next one is twice as far

Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Seen:
  """What the learner's forward finds for one sequence; T places, L layers.

  Attributes:
    hidden_TD: after the final norm.
    logp_T: float32, log-prob of the token that follows each place.
    routes_LTk: int32, experts in slot order.
  """

  hidden_TD: jax.Array
  logp_T: np.ndarray
  routes_LTk: np.ndarray


class Arm:
  """A policy in one precision.

  Args:
    cfg: its shape; max_context tokens are read at once.
    weights: rounded to the precision, all but the routers' biases.
    temperature: of draws and log-probs.

  Raises:
    ValueError: if the precision does not fit the policy, or the context is not
      a multiple of the row tile.
  """

  def __init__(self, cfg: PolicyConfig, weights: Any, temperature: float = 1.0):
    if cfg.max_context % nx.ROW_TILE:
      raise ValueError(
          f'context={cfg.max_context}: a multiple of {nx.ROW_TILE} is needed'
      )
    self.cfg, self.temperature = cfg, temperature

    def cast(path, value):
      return value if model.is_balance(path) else cfg.numerics.cast(value)

    self.weights = jax.tree_util.tree_map_with_path(cast, weights)
    self._read = nx.jit(
        functools.partial(_read, cfg=cfg, temperature=temperature),
        exact=cfg.exact,
    )

  def read(self, tokens: np.ndarray) -> Seen:
    """Returns what the learner finds for at most max_context tokens."""
    row = np.zeros(self.cfg.max_context + 1, np.int32)
    row[: len(tokens)] = tokens
    hidden, logp, routes = self._read(self.weights, row)
    return Seen(hidden, np.asarray(logp), np.asarray(routes))

  def draw(
      self, prompts: Sequence[np.ndarray], seed: int
  ) -> list[traffic.Played]:
    """Returns rollouts that the engine continues to the whole context."""
    cfg, count = self.cfg, len(prompts)
    rows = -(-count // nx.ROW_TILE) * nx.ROW_TILE
    engine = engine_lib.Engine(
        cfg,
        seed,
        max_sequences=count,
        steps=((rows, count), (4 * rows, count + rows // 2)),
        sampling=engine_lib.Sampling(self.temperature),
    )
    engine.load_params(self.weights, 0)
    scripts = [
        traffic.Script(i, tuple(map(int, p)), (cfg.max_context - len(p),))
        for i, p in enumerate(prompts)
    ]
    played = traffic.play(engine, scripts)
    return [played[s.rollout_id] for s in scripts]

  def unequal(
      self, played: Sequence[traffic.Played], seen: Sequence[Seen]
  ) -> dict[str, int]:
    """Counts what differs between the engine's records and the learner's."""
    out = dict.fromkeys(
        ('positions', 'unequal_bits', 'routed_tokens', 'route_flips'), 0
    )
    for item, found in zip(played, seen, strict=True):
      places = np.flatnonzero(item.sampled)
      out['positions'] += len(places)
      out['unequal_bits'] += bits.unequal_bits(
          item.logp[places], found.logp_T[places - 1]
      )
      known = item.routes >= 0
      ours = found.routes_LTk.transpose(1, 0, 2)[: len(item.tokens)]
      out['routed_tokens'] += int(known.all((1, 2)).sum())
      out['route_flips'] += int((known & (ours != item.routes)).sum())
    return out


def _read(weights, row, *, cfg, temperature):
  size = cfg.max_context
  layout = layouts.row_layout(jnp.arange(size)[None], cfg.page)
  hidden, routes, _ = forward_lib.forward(weights, row[:size], layout, cfg)
  logp, _ = head_ops.logprobs(
      hidden,
      forward_lib.head(weights, cfg),
      row[1:],
      temperature=temperature,
      numerics=cfg.numerics,
      impl=cfg.impl,
  )
  return hidden, logp, routes


@functools.partial(jax.jit, static_argnames='temperature')
def _distances(hidden_a, hidden_b, head_a, head_b, *, temperature):
  """Returns KL(a || b) and whether both find one token likeliest, [T] each."""

  def tile(rows):
    one, two = (
        jax.nn.log_softmax(
            jnp.dot(x.astype(nx.F32), w.astype(nx.F32), precision='highest')
            / temperature
        )
        for x, w in zip(rows, (head_a, head_b))
    )
    same = one.argmax(-1) == two.argmax(-1)
    return (jnp.exp(one) * (one - two)).sum(-1), same

  tiles = [x.reshape(-1, nx.ROW_TILE, x.shape[1]) for x in (hidden_a, hidden_b)]
  kl, same = lax.map(tile, tiles)
  return kl.reshape(-1), same.reshape(-1)


def measure(
    cfg: PolicyConfig,
    weights: Any,
    *,
    a: str = 'bfloat16',
    b: str = 'fp8',
    context: int = 4096,
    sequences: int = 8,
    own: int = 64,
    prompts: Sequence[Sequence[int]] = (),
    temperature: float = 1.0,
    seed: int = 0,
    note: Note = lambda text: None,
) -> dict[str, Any]:
  """Compares two precisions of a policy over rollouts that arm a draws.

  Args:
    cfg: shape of the policy; precision and max_context are replaced.
    weights: of the policy.
    a: precision of the arm that draws.
    b: the other precision.
    context: tokens of a rollout.
    sequences: number of rollouts.
    own: tokens that arm b draws at the end of each, for the comparison of b
      with itself.
    prompts: token ids that open each rollout; random ones if there are none.
    temperature: of draws and log-probs, above 0.
    seed: of the draws and of random prompts.
    note: told how far it is.

  Returns:
    The report, JSON values: `kl`, `mean_abs_dlogp`, `max_abs_dlogp`, `top1`,
    `slots`, `experts` of all positions and, as `buckets`, by the number of
    tokens before a place; `layers`, the routes of each; `exact`, each precision
    against itself; `holds`, whether that found no difference.

  Raises:
    ValueError: a value does not fit the policy.
  """
  if a == b:
    raise ValueError(f'a={a!r}, b={b!r}: two precisions are needed')
  if sequences < 1:
    raise ValueError(f'sequences={sequences}: at least 1 is needed')
  if not temperature > 0:
    raise ValueError(f'temperature={temperature}: allowed is above 0')
  arms = [
      Arm(
          dataclasses.replace(cfg, precision=p, max_context=context),
          weights,
          temperature,
      )
      for p in (a, b)
  ]
  openings = _openings(prompts, cfg.vocab, sequences, seed)
  longest = max(map(len, openings))
  if not 0 < own < context - longest:
    raise ValueError(
        f'own={own}: allowed are 1..{context - longest - 1}, with prompts of'
        f' {longest} tokens in a context of {context}'
    )
  note(f'{a}: the engine draws {sequences} x {context - longest} tokens')
  played = arms[0].draw(openings, seed)
  exact: dict[str, Any] = {}
  seen: list[Any] = []
  for name, arm in zip((a, b), arms):
    note(f'{name}: the learner reads them')
    seen.append([arm.read(item.tokens) for item in played])
    if not exact:
      exact[name] = arm.unequal(played, seen[0])
      continue
    note(f'{name}: the engine reads them and draws {sequences} x {own} tokens')
    again = arm.draw([item.tokens[:-own] for item in played], seed)
    exact[name] = arm.unequal(again, [arm.read(i.tokens) for i in again])
  heads = [forward_lib.head(arm.weights, arm.cfg) for arm in arms]
  columns = [
      _columns(item, one, two, heads, temperature)
      for item, one, two in zip(played, *seen)
  ]
  joined = {k: np.concatenate([c[k] for c in columns]) for k in columns[0]}
  differ = ('unequal_bits', 'route_flips')
  return {
      'a': a,
      'b': b,
      'context': context,
      'sequences': sequences,
      **_figures(joined),
      'layers': _layers(joined),
      'buckets': _buckets(joined, context),
      'exact': exact,
      'holds': not any(e[k] for e in exact.values() for k in differ),
  }


def _openings(prompts, vocab: int, count: int, seed: int) -> list[np.ndarray]:
  """Returns so many prompts: those given, in turn, or random ones."""
  given = [np.asarray(p, np.int32) for p in prompts]
  if given:
    return [given[i % len(given)] for i in range(count)]
  rng = np.random.default_rng(seed)
  return [rng.integers(0, vocab, PROMPT, np.int32) for _ in range(count)]


def _columns(item, one, two, heads, temperature) -> dict[str, np.ndarray]:
  """Returns one number, or one for each layer, for every place of a rollout.

  Places are those from which a token was drawn.
  """
  kl, same = _distances(
      one.hidden_TD, two.hidden_TD, *heads, temperature=temperature
  )
  places = np.flatnonzero(item.sampled) - 1
  first, other = (s.routes_LTk[:, places] for s in (one, two))
  kept = (first[..., None] == other[:, :, None]).any(-1)
  return {
      'before': places,
      'kl': np.asarray(kl, np.float64)[places],
      'dlogp': np.abs(one.logp_T - two.logp_T).astype(np.float64)[places],
      'top1': np.asarray(same)[places],
      'slots': (first != other).mean(-1).T.reshape(len(places), -1),
      'experts': (~kept).mean(-1).T.reshape(len(places), -1),
  }


def _figures(columns) -> dict[str, Any]:
  mean = lambda name: float(columns[name].mean())
  routed = columns['slots'].size > 0
  return {
      'positions': len(columns['kl']),
      'kl': mean('kl'),
      'max_kl': float(columns['kl'].max()),
      'mean_abs_dlogp': mean('dlogp'),
      'max_abs_dlogp': float(columns['dlogp'].max()),
      'top1': mean('top1'),
      'slots': mean('slots') if routed else 0.0,
      'experts': mean('experts') if routed else 0.0,
  }


def _layers(columns) -> list[dict[str, float]]:
  """Returns the routes that differ in each layer with a router, in order."""
  names = ('slots', 'experts')
  shares = [columns[n].mean(0).tolist() for n in names]
  return [dict(zip(names, layer)) for layer in zip(*shares)]


def _buckets(columns, context: int) -> list[dict[str, Any]]:
  """Returns the figures by number of tokens before a place."""
  out, low, high = [], 0, FIRST_EDGE
  while low < context:
    inside = (columns['before'] >= low) & (columns['before'] < high)
    if inside.any():
      part = {k: v[inside] for k, v in columns.items()}
      out.append({'from': low, 'to': min(high, context)} | _figures(part))
    low, high = high, 2 * high
  return out


def table(report: dict[str, Any]) -> str:
  """Returns the report as text."""
  a, b = report['a'], report['b']
  names = ('kl', 'mean_abs_dlogp', 'max_abs_dlogp', 'top1', 'slots', 'experts')
  line = '{:>12s} {:>9s}' + ' {:>14s}' * len(names)
  out = [
      f'{a} against {b}: {report["sequences"]} rollouts of'
      f' {report["context"]} tokens, drawn by {a}',
      line.format('tokens', 'positions', *names),
  ]
  whole = {'from': 0, 'to': report['context']} | report
  for bucket in (*report['buckets'], whole):
    out.append(
        line.format(
            f'{bucket["from"]}-{bucket["to"]}',
            str(bucket['positions']),
            *(f'{bucket[n]:.4g}' for n in names),
        )
    )
  for i, layer in enumerate(report['layers']):
    shares = ', '.join(f'{k} {100 * v:.2f} %' for k, v in layer.items())
    out.append(f'routes that differ in the router of layer {i}: {shares}')
  for name, counts in report['exact'].items():
    out.append(
        f'{name} with itself: '
        + ', '.join(f'{v} {k}' for k, v in counts.items())
    )
  return '\n'.join(out)
