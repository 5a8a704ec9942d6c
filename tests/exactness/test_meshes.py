"""A mesh is a way to compute, not a policy: mesh A against mesh B.

Traffic is sampled on one mesh; another mesh's gradient program finds the same
log-probs and the same experts. What one device samples for the same traffic is
equal too: tokens, log-probs and routes.
"""

import jax
import numpy as np
import pytest

from agentic_rl.diagnostics import traffic
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import update
from agentic_rl.parallel import mesh
from agentic_rl.policy import model
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib
from tests.rollout import samples

SMALL = dict(max_context=64)
MIXED = SMALL | dict(
    pattern='wbf', layers=4, dense_layers=1, dense_width=48, shared_width=16,
    gating='sigmoid', tied=True, remat=True, attention_sink=True,
    soft_cap=3.0, sink_page=True,
)  # fmt: skip


def place(weights, cfg, parallel):
  own = samples.copy(weights)  # programs take it over
  if parallel.mesh is None:
    return own
  return jax.device_put(own, parallel.shardings(model.logical_axes(cfg)))


def sample(cfg, weights, scripts, parallel):
  options = dict(
      max_sequences=16, pool_pages=16 * cfg.pages_per_sequence,
      sampling=engine_lib.Sampling(),
  )  # fmt: skip
  if parallel.mesh is None:
    engine = engines_lib.Engines(cfg, 3, engines=1, **options)
  else:
    engine = engines_lib.MeshEngines(cfg, 3, parallel=parallel, **options)
  engine.load_params(place(weights, cfg, parallel), 0)
  played = traffic.play(engine, scripts)
  assert engine.counts['kv_hits'] > 0
  return played


def learn(cfg, weights, examples, parallel):
  """Returns the metrics of one update, and the new weights."""
  learner = update.Learner(
      cfg,
      update.LossConfig(),
      optimizer_lib.make('muon', learning_rate=1e-2, steps=9),
      rows=4,
      row_tokens=2 * cfg.max_context,
      parallel=parallel,
  )
  weights = place(weights, cfg, parallel)
  batch = learner.pack(examples)
  new, _, stats = learner.update(weights, learner.init(weights), batch)
  return stats, jax.device_get(new)


def check(fields, sampled_on, learned_on, count=40):
  cfg = samples.config(**fields)
  weights = samples.weights(cfg)
  scripts = samples.traffic(cfg, count, 5)
  one = sample(cfg, weights, scripts, mesh.SINGLE)
  expected, new = learn(
      cfg, weights, traffic.examples(scripts, one), mesh.SINGLE
  )
  drawn = sum(int(p.sampled.sum()) for p in one.values())
  assert expected['mismatch/compared'] == drawn
  assert expected['mismatch/unequal_bits'] == expected['router/flips'] == 0
  played = one
  if sampled_on:
    played = sample(cfg, weights, scripts, mesh.make(sampled_on))
    samples.assert_same(one, played)
  for text in learned_on:
    parallel = mesh.make(text)
    stats, other = learn(
        cfg, weights, traffic.examples(scripts, played), parallel
    )
    print(f'{sampled_on} -> {text}: {drawn} drawn tokens')
    assert stats['mismatch/compared'] == drawn
    assert stats['mismatch/unequal_bits'] == 0, text
    assert stats['router/flips'] == 0 and stats['router/flip_rate'] == 0
    # Gradients are summed in another order: close, not equal.
    for name in ('loss', 'grad_norm', 'learner_tokens', 'router/max_load'):
      np.testing.assert_allclose(stats[name], expected[name], rtol=2e-4)
    gap = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (new, other)))
    ]
    assert max(gap) < (2e-5 if cfg.precision == 'float32' else 2e-2)


def test_another_mesh_finds_the_same_bits():
  check(
      SMALL | dict(precision='bfloat16'),
      'data=2,fsdp=2,expert=2',
      ['fsdp=2,expert=2,context=2'],
  )


@pytest.mark.slow
@pytest.mark.parametrize(
    ('precision', 'sampled_on', 'learned_on'),
    [
        ('float32', 'data=8', ['context=8', 'data=2,expert=4']),
        ('bfloat16', 'data=2,expert=4', ['data=8', 'fsdp=2,context=4']),
        ('bfloat16', 'fsdp=8', ['data=2,fsdp=2,expert=2']),
        ('fp8', 'data=2,context=2', ['fsdp=2,expert=2']),
    ],
)
def test_meshes_against_meshes(precision, sampled_on, learned_on):
  check(SMALL | dict(precision=precision), sampled_on, learned_on, 120)


@pytest.mark.slow
def test_every_kind_of_layer():
  check(
      MIXED,
      'fsdp=2,expert=2,context=2',
      ['fsdp=2,expert=2,context=2', 'data=2,context=4'],
  )


@pytest.mark.slow
def test_the_pallas_kernels_on_a_mesh():
  check(
      SMALL | dict(impl='pallas', precision='bfloat16'),
      'data=2,expert=2',
      ['expert=2,context=2'],
      20,
  )
