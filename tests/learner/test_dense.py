"""Policies without a router learn, too: their recorded routes hold nothing."""

import numpy as np
import pytest

from agentic_rl.diagnostics import traffic
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import update
from tests.rollout import samples


@pytest.mark.parametrize(
    'change', [dict(experts=0), dict(dense_layers=2)], ids=['none', 'all-dense']
)
def test_a_policy_without_routers(change):
  cfg = samples.config(layers=2, dense_width=16, **change)
  weights = samples.weights(cfg)
  scripts = samples.traffic(cfg, 6, 1)
  played = samples.play(samples.make_engine(cfg), scripts)
  examples = traffic.examples(scripts, played)
  assert examples[0].routes.shape[1] == 0
  learner = update.Learner(
      cfg,
      update.LossConfig(),
      optimizer_lib.make('adam', learning_rate=1e-3, steps=1),
      rows=4,
      row_tokens=64,
  )
  state = learner.init(weights)
  new, _, stats = learner.update(
      samples.copy(weights), state, learner.pack(examples)
  )
  assert stats['mismatch/compared'] == sum(sum(s.draws) for s in scripts)
  assert stats['mismatch/unequal_bits'] == stats['router/flips'] == 0
  moved = np.abs(np.asarray(new['final_norm'] - weights['final_norm'])).max()
  assert 0 < moved < 0.1 and np.isfinite(stats['grad_norm'])
