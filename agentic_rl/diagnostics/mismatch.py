"""How far two sides disagree about the same tokens: statistics and a verdict.

Pure functions on NumPy arrays. The sides are called sampler and learner; what
is compared is the log-prob each gives to the token that followed, and the
experts each sends a token to. With δ = log π_learner - log π_sampler of a token
and the ratio ρ = e^δ:

  kl_k1   mean of -δ: unbiased for KL(sampler || learner), may be negative
  kl_k3   mean of ρ - 1 - δ: unbiased too, never negative, of less variance
          (Source: arXiv:2402.03300 eq. 4)
  outside share of tokens whose ratio leaves [0.9, 1.1] or [0.99, 1.01]

Both estimate a KL where the sampler drew the tokens; over tokens that were
given they are means over these tokens.

  multiplicative error  e^|Σ δ| - 1, the sum running over a sequence from its
          beginning to the last token in a bucket: the factor by which the
          importance weight of the sequence so far is off; mean and maximum
          over the sequences that reach the bucket

The verdict is 'exact' if no bit and no route differs. Otherwise |δ| is fitted
by a line over the context length; the verdict is 'accumulating' if the whole
95 % interval of its slope lies above zero, else 'flat'. The interval is that of
a bootstrap over sequences, since the tokens of one depend on each other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import numpy as np

from agentic_rl import numerics

FIRST_EDGE = 16  # end of the first bucket; each next one is twice as far
RESAMPLES = 1000
# With fewer sequences than this, blocks of them are resampled instead.
CLUSTERS = 20
_LARGEST_EXPONENT = 600.0  # the sum of many is a number, too


@dataclasses.dataclass(frozen=True)
class Compared:
  """Tokens that both sides scored, in order of sequence and place.

  Attributes:
    sequences_P: int [P], number of the token's sequence.
    contexts_P: int [P], tokens before it in the sequence.
    sampler_P: float32 [P], log-probs.
    learner_P: float32 [P], log-probs.
    hits_P: float [P], share of the sampler's likeliest tokens that are among
      as many of the learner's; empty where unknown.
    route_contexts_R: int [R], tokens before each token whose experts both know.
    flips_RL: int [R, L], slots of each layer in which they differ; a slot that
      one side does not know does not differ.
    slots: experts per token.

  Raises:
    ValueError: arrays do not fit, are out of order or not finite.
  """

  sequences_P: np.ndarray
  contexts_P: np.ndarray
  sampler_P: np.ndarray
  learner_P: np.ndarray
  hits_P: np.ndarray
  route_contexts_R: np.ndarray
  flips_RL: np.ndarray
  slots: int

  def __post_init__(self):
    count = len(self.sequences_P)
    if not count:
      raise ValueError('0 positions to compare: at least one is needed')
    for name in ('contexts_P', 'sampler_P', 'learner_P'):
      if len(getattr(self, name)) != count:
        raise ValueError(
            f'{name} of {len(getattr(self, name))}: {count} are needed'
        )
    if len(self.hits_P) not in (0, count):
      raise ValueError(f'hits_P of {len(self.hits_P)}: 0 or {count} are needed')
    if len(self.route_contexts_R) != len(self.flips_RL):
      raise ValueError(
          f'flips_RL of {len(self.flips_RL)}:'
          f' {len(self.route_contexts_R)} are needed'
      )
    steps = np.diff(self.sequences_P)
    if (steps < 0).any() or (np.diff(self.contexts_P)[steps == 0] <= 0).any():
      raise ValueError('positions must be in order of sequence and context')
    for name in ('sampler_P', 'learner_P'):
      if not np.isfinite(getattr(self, name)).all():
        raise ValueError(f'{name} holds log-probs that are not finite')

  @property
  def deltas_P(self) -> np.ndarray:
    """δ = log π_learner - log π_sampler, float64 [P]."""
    return self.learner_P.astype(float) - self.sampler_P.astype(float)


def join(parts: Sequence[Compared]) -> Compared:
  """Appends positions of sequences with distinct, ascending numbers."""
  cut: dict[str, Any] = {'slots': parts[0].slots}
  for field in dataclasses.fields(Compared):
    if field.name != 'slots':
      cut[field.name] = np.concatenate([getattr(p, field.name) for p in parts])
  return Compared(**cut)


def summary(compared: Compared, seed: int = 0) -> dict[str, Any]:
  """Returns everything about one pair of sides as JSON values.

  Args:
    compared: at least one position.
    seed: of the bootstrap.

  Returns:
    The figures of all positions, `buckets` by context length with the same
    figures, `slope` of |δ| and `verdict`.
  """
  everywhere = (0, 1 << 62)
  out = _figures(compared, *everywhere)
  edges = bucket_edges(
      max(compared.contexts_P.max(), compared.route_contexts_R.max(initial=0))
  )
  buckets = []
  for low, high in zip(edges[:-1], edges[1:]):
    figures = _figures(compared, low, high)
    if figures['positions']:
      buckets.append({'from': low, 'to': high, **figures})
  out['slope'] = slope(
      compared.sequences_P,
      compared.contexts_P,
      np.abs(compared.deltas_P),
      seed=seed,
  )
  out['verdict'] = verdict(
      out['unequal_bits'], out['route_flips'], out['slope']
  )
  out['buckets'] = buckets
  return out


def bucket_edges(longest: int) -> list[int]:
  """Returns 0, 16, 32, 64, ... until the last is above `longest`."""
  edges = [0, FIRST_EDGE]
  while edges[-1] <= longest:
    edges.append(2 * edges[-1])
  return edges


def verdict(unequal: int, flips: int, fitted: dict[str, Any]) -> str:
  """Returns 'exact', 'flat' or 'accumulating' (see the module)."""
  if not unequal and not flips:
    return 'exact'
  low = fitted['low_per_1k']
  return 'accumulating' if low is not None and low > 0 else 'flat'


def slope(
    sequences_P, contexts_P, values_P, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, Any]:
  """Fits values ≈ a + b · context by least squares, with an interval for b.

  The 95 % interval holds the middle of the slopes of bootstrap samples, drawn
  by whole sequences. Fewer than `CLUSTERS` sequences are cut into as many
  blocks of neighbours, so that the tokens of a block may depend on each other,
  but those of distant blocks of a sequence are taken to be independent.

  Args:
    sequences_P: [P] number of the sequence of each position, ascending.
    contexts_P: [P] tokens before it.
    values_P: [P] what is fitted.
    seed: of the resampling.
    resamples: bootstrap samples.

  Returns:
    `per_1k`, `low_per_1k`, `high_per_1k`: change of the value in 1,000 tokens,
    None where all contexts are equal; `clusters`: what was resampled.
  """
  x = np.asarray(contexts_P, float)
  y = np.asarray(values_P, float)
  x = x - x.mean()
  cluster = _clusters(np.asarray(sequences_P))
  count = int(cluster[-1]) + 1
  moments = [np.ones_like(x), x, y, x * x, x * y]
  sums = np.stack([np.bincount(cluster, m, count) for m in moments], 1)
  rng = np.random.default_rng(seed)
  drawn = []
  for _ in range(0, resamples, 100):
    times = rng.multinomial(count, np.full(count, 1 / count), 100)
    drawn.append(_slopes(times @ sums))
  found = np.concatenate(drawn)
  found = found[np.isfinite(found)]
  per_1k = float(1000 * _slopes(sums.sum(0)))
  out: dict[str, Any] = {'per_1k': per_1k if np.isfinite(per_1k) else None}
  low, high = None, None
  if out['per_1k'] is not None and len(found) and count > 1:
    low, high = (float(1000 * q) for q in np.quantile(found, [0.025, 0.975]))
  return {**out, 'low_per_1k': low, 'high_per_1k': high, 'clusters': count}


def _clusters(sequences: np.ndarray) -> np.ndarray:
  """Returns the number of each position's sequence or block, 0, 1, ..."""
  _, number = np.unique(sequences, return_inverse=True)
  count = int(number[-1]) + 1
  if count >= CLUSTERS:
    return number
  blocks = -(-CLUSTERS // count)
  sizes = np.bincount(number)
  place = np.arange(len(number)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
  block = place * blocks // sizes[number]
  _, number = np.unique(number * blocks + block, return_inverse=True)
  return number


def _slopes(sums: np.ndarray) -> np.ndarray:
  """Least-squares slopes from [..., (n, Σx, Σy, Σx², Σxy)]."""
  n, x, y, xx, xy = np.moveaxis(np.asarray(sums, float), -1, 0)
  spread = n * xx - x * x
  safe = spread > 1e-9 * np.maximum(n * xx, 1e-30)
  return np.where(safe, (n * xy - x * y) / np.where(safe, spread, 1), np.nan)


def _figures(c: Compared, low: int, high: int) -> dict[str, Any]:
  """Figures of the positions and routes with a context in low..high-1."""
  here = (c.contexts_P >= low) & (c.contexts_P < high)
  delta = c.deltas_P[here]
  size = np.abs(delta)
  ratio = np.exp(np.minimum(delta, _LARGEST_EXPONENT))
  mean = lambda a: float(a.mean()) if len(a) else 0.0
  error = _multiplicative(c, high)[here[_last_below(c, high)]]
  out: dict[str, Any] = {
      'positions': len(delta),
      'unequal_bits': numerics.unequal_bits(
          c.sampler_P[here], c.learner_P[here]
      ),
      'max_abs_dlogp': float(size.max(initial=0)),
      'mean_abs_dlogp': mean(size),
      'kl_k1': mean(-delta) + 0.0,  # no negative zero
      'kl_k3': mean(ratio - 1 - delta),
      'outside_10_percent': mean((ratio < 0.9) | (ratio > 1.1)),
      'outside_1_percent': mean((ratio < 0.99) | (ratio > 1.01)),
      'topk_hit_rate': mean(c.hits_P[here]) if len(c.hits_P) else None,
      'multiplicative_error': mean(error),
      'multiplicative_error_max': float(error.max(initial=0)),
  }
  flips = c.flips_RL[
      (c.route_contexts_R >= low) & (c.route_contexts_R < high)
  ].astype(np.int64)
  known = max(1, len(flips) * c.slots)
  out['route_flips'] = int(flips.sum())
  out['routed_tokens'] = len(flips)
  out['flip_rate_by_layer'] = (flips.sum(0) / known).tolist()
  return out


def _last_below(c: Compared, high: int) -> np.ndarray:
  """Returns the index of each sequence's last position below a context."""
  below = np.flatnonzero(c.contexts_P < high)
  sequences = c.sequences_P[below]
  last = np.append(sequences[1:] != sequences[:-1], True)
  return below[last[: len(below)]]


def _multiplicative(c: Compared, high: int) -> np.ndarray:
  """Returns e^|Σ δ| - 1 of each sequence up to a context."""
  sums = np.cumsum(c.deltas_P)
  first = np.flatnonzero(
      np.append(True, c.sequences_P[1:] != c.sequences_P[:-1])
  )
  ahead = np.append(0.0, sums)[first]
  number = np.cumsum(np.isin(np.arange(len(sums)), first)) - 1
  last = _last_below(c, high)
  total = np.abs(sums[last] - ahead[number[last]])
  return np.expm1(np.minimum(total, _LARGEST_EXPONENT))
