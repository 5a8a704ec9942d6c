"""Losses per trained token; the update takes their weighted mean.

New loss: write the function, add a line to `LOSSES`, add a test with values
computed by hand.
"""

from __future__ import annotations

from typing import Callable, Mapping

import jax.numpy as jnp


def supervised(logp_new, logp_behavior, advantages):
  """-log p(y): maximum likelihood.

  Args:
    logp_new: float32 [R], log-prob of each target under the current policy.
    logp_behavior: unused.
    advantages: unused.

  Returns:
    float32 [R] loss, and the share of tokens whose ratio was clipped (0).
  """
  del logp_behavior, advantages
  return -logp_new, jnp.zeros_like(logp_new)


def ppo_clip(
    logp_new, logp_behavior, advantages, *, clip_low=0.8, clip_high=1.28
):
  """-min(ρ A, clip(ρ, low, high) A), ρ = exp(log π_new - log π_behavior).

  Source: arXiv:1707.06347 eq. 7, with the two bounds apart as in
  arXiv:2503.14476 eq. 10.

  Args:
    logp_new: float32 [R], log-prob of each target under the current policy.
    logp_behavior: float32 [R], recorded when it was drawn.
    advantages: float32 [R].
    clip_low: lower bound of the ratio.
    clip_high: upper bound of the ratio.

  Returns:
    float32 [R] loss, and 1 where the clipped branch was taken.
  """
  ratio = jnp.exp(logp_new - logp_behavior)
  free = ratio * advantages
  held = jnp.clip(ratio, clip_low, clip_high) * advantages
  return -jnp.minimum(free, held), (held < free).astype(jnp.float32)


LOSSES: Mapping[str, Callable] = {
    'supervised': supervised,
    'ppo_clip': ppo_clip,
}
