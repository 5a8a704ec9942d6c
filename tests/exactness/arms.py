"""Both sides of the comparison: traffic through the engine, the learner on it.

A position is a token that the policy drew, whose recorded log-prob and whose
recorded experts in all layers are compared with those of one program.
"""

import functools

import numpy as np

from agentic_rl import numerics
from agentic_rl.diagnostics import traffic
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from kernels_pallas import numerics as nx
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


def make_learner(cfg, rows, row_tokens, temperature=1.0):
  return update.Learner(
      cfg,
      update.LossConfig(temperature=temperature),
      optimizer_lib.make('adam', learning_rate=1e-3, steps=9),
      rows=rows,
      row_tokens=row_tokens,
  )


def check_forward(cfg, packing, temperature=1.0):
  """Returns (weights, examples) -> (compared, unequal, flips), plain forward."""
  one = make_learner(cfg, *packing)
  program = nx.jit(
      functools.partial(
          update.policy_logprobs, cfg=cfg, temperature=temperature
      ),
      exact=cfg.exact,
  )

  def check(weights, examples):
    compared = unequal = flips = 0
    for part in pack_lib.microbatches(one.pack(examples), one.rows):
      inputs = inputs_lib.flatten(part)
      logp, _, routes = program(weights, inputs)
      places = inputs['rows'][inputs['rows'] < inputs['tokens'].size]
      recorded = inputs['logp_behavior'][places]
      assert inputs['sampled'][places].all()
      # The experts of the place that drew the token are known.
      assert (inputs['routes'][places] >= 0).all()
      compared += len(places)
      found = np.asarray(logp)[: len(places)]
      unequal += numerics.unequal_bits(found, recorded)
      known = inputs['routes'] >= 0
      found = np.asarray(routes).transpose(1, 0, 2)
      flips += int((known & (found != inputs['routes'])).sum())
    return compared, unequal, flips

  return check


def check_update(cfg, packing, temperature=1.0):
  """Returns the same of the gradient program."""
  one = make_learner(cfg, *packing, temperature)

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
