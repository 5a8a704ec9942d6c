"""Both sides of the comparison: traffic through the engine, the learner on it.

A position is a token that the policy drew, whose recorded log-prob and whose
recorded experts in all layers are compared with those of one program.
"""

import numpy as np

from agentic_rl.diagnostics import policy_matrix
from agentic_rl.diagnostics import traffic
from tests.rollout import samples


def generate(cfg, scripts, **options):
  """Plays traffic; returns the examples, in the order of the scripts."""
  weights = samples.weights(cfg)
  engine = samples.make_engine(cfg, weights_=weights, **options)
  played = samples.play(engine, scripts)
  pages = engine.pages
  assert pages.in_use == 0
  assert pages.hits > len(scripts) // 4  # prefixes were shared
  assert pages.misses > 4 * pages.num_pages  # and pages were evicted
  return weights, traffic.examples(scripts, played)


def check_forward(cfg, packing, temperature=1.0):
  """Returns (weights, examples) -> (compared, unequal, flips), plain forward."""
  one = policy_matrix.make_learner(cfg, *packing, temperature)
  return lambda *sides: policy_matrix.by_forward(one, *sides)[:3]


def check_update(cfg, packing, temperature=1.0):
  """Returns the same of the gradient program."""
  one = policy_matrix.make_learner(cfg, *packing, temperature)

  def check(weights, examples):
    own = samples.copy(weights)
    _, _, stats = one.update(own, one.init(own), one.pack(examples))
    unequal = int(stats['mismatch/unequal_bits'])
    if not unequal:
      assert stats['mismatch/max_abs_dlogp'] == 0
      assert stats['mismatch/max_abs_ratio_dev'] == 0
    assert np.isfinite(stats['grad_norm']) and stats['grad_norm'] > 0
    compared = int(stats['mismatch/compared'])
    return compared, unequal, int(stats['router/flips'])

  return check


def shuffled(examples):
  order = np.random.default_rng(1).permutation(len(examples))
  return [examples[i] for i in order]
