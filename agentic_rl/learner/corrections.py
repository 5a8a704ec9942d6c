"""Corrections for tokens that another policy drew than the one that learns.

Where sampler and learner can not be equal (stale weights, foreign samplers) the
update multiplies a token's loss by a weight made of the ratios

  ρ_t = π_learner(y_t) / π_behavior(y_t),

both before the update, so no gradient passes through them. With an exact
sampler every ratio, and so every weight, is exactly 1.

A masked token keeps its place in the mean that the loss is, as in IcePop: what
is left out makes the step shorter, not the rest of it longer.

New correction: write the function, add a line to `CORRECTIONS` and its options
to `config.learner.correction`, add a test with values computed by hand.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Mapping

import jax.numpy as jnp
from jax import lax

from agentic_rl.parallel import mesh


def none(gap_R, drawn_R, sums):
  """w_t = 1.

  Args:
    gap_R: float32 [R], log ρ of each row, 0 where nothing was drawn.
    drawn_R: bool [R], whether the policy drew the token.
    sums: float32 [R] -> [R], in every row the sum over the rows of its
      sequence.

  Returns:
    float32 [R] weights, and bool [R] whether a cap bound.
  """
  del drawn_R, sums
  return jnp.ones_like(gap_R), jnp.zeros(gap_R.shape, bool)


def tis_token(gap_R, drawn_R, sums, *, cap=2.0):
  """w_t = min(ρ_t, C).

  It ignores that the tokens before t were drawn by the behaviour policy too, so
  a bias is left; its variance does not grow with the length.
  Source: arXiv:1802.01561 section 4.1, ρ_t = min(ρ̄, π/μ); for two engines Yao
  et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL
  training'.

  Args:
    gap_R: see `none`.
    drawn_R: see `none`.
    sums: see `none`.
    cap: C.

  Returns:
    See `none`.
  """
  del drawn_R, sums
  return _truncated(gap_R, cap)


def tis_sequence(gap_R, drawn_R, sums, *, cap=2.0):
  """w_t = min(Π_s ρ_s, C), the product over the drawn tokens of the sequence.

  Without a bias where the cap does not bind; the variance of the product grows
  with the length.
  Source: truncated importance sampling, Ionides 2008 (J. Comput. Graph. Stat.
  17:295) eq. 2, of whole sequences as in arXiv:2507.18071 eq. 3.

  Args:
    gap_R: see `none`.
    drawn_R: see `none`.
    sums: see `none`.
    cap: C.

  Returns:
    See `none`.
  """
  del drawn_R
  return _truncated(sums(gap_R), cap)


def mask_token(gap_R, drawn_R, sums, *, low=0.5, high=2.0):
  """w_t = ρ_t if low <= ρ_t <= high, else 0.

  Source: IcePop, arXiv:2510.18855, M(k) = k for k in [α, β], else 0.

  Args:
    gap_R: see `none`.
    drawn_R: see `none`.
    sums: see `none`.
    low: smallest ratio that counts.
    high: largest ratio that counts.

  Returns:
    See `none`.
  """
  del drawn_R, sums
  return _masked(gap_R, low, high)


def mask_sequence(gap_R, drawn_R, sums, *, low=0.5, high=2.0):
  """w_t = r if low <= r <= high, else 0; r = Π_s ρ_s.

  Source: masked importance sampling of sequences, Liu et al. 2025, 'When speed
  kills stability: demystifying RL collapse from the training-inference
  mismatch'.

  Args:
    gap_R: see `none`.
    drawn_R: see `none`.
    sums: see `none`.
    low: smallest ratio that counts.
    high: largest ratio that counts.

  Returns:
    See `none`.
  """
  del drawn_R
  return _masked(sums(gap_R), low, high)


def mask_geometric(gap_R, drawn_R, sums, *, low=0.9, high=1.1):
  """w_t = r if low <= r <= high, else 0; r = (Π_s ρ_s)^(1/n), n drawn tokens.

  Long and short sequences are held to the same bounds. The weight is no
  importance weight: a bias is left.
  Source: the ratio of arXiv:2507.18071 eq. 7.

  Args:
    gap_R: see `none`.
    drawn_R: see `none`.
    sums: see `none`.
    low: smallest ratio that counts.
    high: largest ratio that counts.

  Returns:
    See `none`.
  """
  count = sums(drawn_R.astype(gap_R.dtype))
  mean = sums(gap_R) / jnp.maximum(count, 1)
  return _masked(mean, low, high)


CORRECTIONS: Mapping[str, Callable] = {
    'none': none,
    'tis_token': tis_token,
    'tis_sequence': tis_sequence,
    'mask_token': mask_token,
    'mask_sequence': mask_sequence,
    'mask_geometric': mask_geometric,
}
ANCHORS = ('behavior', 'learner')
LARGEST_CAP = 1e30  # weights and their sums are float32
# Names of what `stats` counts.
COUNTS = ('corrected', 'weight', 'weight_squared', 'truncated', 'masked')


def check(name: str, options: Mapping[str, Any], anchor: str) -> None:
  """Checks a choice before anything is compiled.

  Args:
    name: key of `CORRECTIONS`.
    options: its keyword options.
    anchor: what the ratio of the loss is taken to: 'behavior', the recorded
      log-prob, or 'learner', the learner's own.

  Raises:
    ValueError: on an unknown name, option or anchor, a bound out of range, or a
      correction beside a ratio that holds the same mismatch already.
  """
  if anchor not in ANCHORS:
    raise ValueError(f'anchor={anchor!r}: allowed are {list(ANCHORS)}')
  if name not in CORRECTIONS:
    raise ValueError(f'correction {name!r}: allowed are {sorted(CORRECTIONS)}')
  known = inspect.signature(CORRECTIONS[name]).parameters.values()
  values = {p.name: p.default for p in known if p.kind is p.KEYWORD_ONLY}
  for option in options:
    if option not in values:
      raise ValueError(
          f'option {option!r} of correction {name!r}: allowed are'
          f' {list(values)}'
      )
  values.update(options)
  if 'cap' in values and not 1 <= values['cap'] <= LARGEST_CAP:
    raise ValueError(
        f'cap={values["cap"]} of correction {name!r}: allowed are 1 or above, up'
        f' to {LARGEST_CAP}'
    )
  if 'low' in values and not 0 <= values['low'] <= 1 <= values['high']:
    raise ValueError(
        f'low={values["low"]}, high={values["high"]} of correction {name!r}:'
        ' allowed is 0 <= low <= 1 <= high, so that equal policies are kept'
    )
  if anchor == 'behavior' and name != 'none':
    raise ValueError(
        f"anchor='behavior' with correction {name!r}: the ratio of the loss is"
        ' already π_new/π_behavior, so the mismatch would count twice; set'
        " anchor='learner', or correction 'none'"
    )


def weigh(name, options, logp, recorded, drawn, sums):
  """Returns the weights of a correction and whether its cap bound.

  Args:
    name: key of `CORRECTIONS`.
    options: keyword options of it.
    logp: float32 [R], of the learner; no gradient passes.
    recorded: float32 [R], of the behaviour policy.
    drawn: bool [R], whether the policy drew the token; others weigh as if their
      ratio were 1.
    sums: see `none`.
  """
  gap = jnp.where(drawn, lax.stop_gradient(logp) - recorded, 0.0)
  return CORRECTIONS[name](gap, drawn, sums, **options)


def stats(weights, truncated, counted) -> dict[str, Any]:
  """Returns the sums that `metrics` needs, over the rows that count."""
  one = counted.astype(weights.dtype)
  w = weights * one
  return {
      'corrected': one.sum(),
      'weight': w.sum(),
      'weight_squared': (w * w).sum(),
      'truncated': (one * truncated).sum(),
      'masked': (one * (weights == 0)).sum(),
  }


def metrics(sums: Mapping[str, float]) -> dict[str, float]:
  """Returns what a correction did, or nothing if none was made.

  The effective sample size is a share of the tokens: (Σ w)² / (n Σ w²).

  Args:
    sums: of `stats`, over all microbatches.
  """
  count = sums['corrected']
  if not count:
    return {}
  squares = count * sums['weight_squared']
  return {
      'correction/mean_weight': sums['weight'] / count,
      'correction/truncated_share': sums['truncated'] / count,
      'correction/masked_share': sums['masked'] / count,
      'correction/ess': sums['weight'] ** 2 / squares if squares else 0.0,
  }


def sequence_sums(x_R, sequence_R, count=0, parallel=mesh.SINGLE):
  """Returns, in every row, the sum over the rows of its sequence.

  A scan over neighbours, in one order whatever the device: no scatter. Where
  the mesh cuts sequences, the parts' sums are added across its context axis.

  Args:
    x_R: float32 [R].
    sequence_R: int32 [R], equal numbers are neighbours.
    count: on such a mesh, above every number of a sequence; a row with a larger
      one gets 0.
    parallel: the mesh.

  Returns:
    float32 [R], the same bits in all rows of a sequence.
  """
  first = jnp.concatenate(
      [jnp.ones(1, bool), sequence_R[1:] != sequence_R[:-1]]
  )

  def join(a, b):
    return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

  total = lax.associative_scan(join, (first, x_R))[1]
  last = jnp.concatenate([first[1:], jnp.ones(1, bool)])
  place = jnp.where(last, jnp.arange(len(x_R)), len(x_R))
  end = lax.cummin(place, reverse=True)  # the next row that ends a sequence
  own = total[end]
  if parallel.size('context') == 1:
    return own
  # All rows of a sequence write the same number.
  table = jnp.zeros(count, x_R.dtype).at[sequence_R].set(own, mode='drop')
  table = parallel.sum(table, 'context')
  return table.at[sequence_R].get(mode='fill', fill_value=0)


def _truncated(gap, cap):
  # The exponent is held, so that no ratio overflows.
  bound = math.log(cap)
  return jnp.where(gap > bound, cap, jnp.exp(jnp.minimum(gap, bound))), (
      gap > bound
  )


def _masked(gap, low, high):
  ratio = jnp.exp(gap)
  kept = (ratio >= low) & (ratio <= high)
  return jnp.where(kept, ratio, 0.0), jnp.zeros(gap.shape, bool)
