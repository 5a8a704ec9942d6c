"""The report on two precisions: by hand, and over rollouts of a tiny policy."""

import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.diagnostics import precision
from agentic_rl.diagnostics import traffic
from tests.rollout import samples

CFG = dict(layers=2, max_context=64)


def played(tokens, sampled, routes):
  logp = np.zeros(len(tokens), np.float32)
  none = np.zeros((len(tokens), 0), np.int32)
  return traffic.Played(
      np.asarray(tokens), np.asarray(sampled), logp, routes, none
  )


def test_figures_by_hand():
  """Two tokens are drawn, at places 1 and 2; two layers, two slots."""
  routes = np.zeros((2, 64, 2), np.int32)
  routes[..., 1] = 1
  other = routes.copy()
  other[0, 1] = 1, 0  # the same experts in other slots
  other[1, 2] = 0, 3
  other[1, 5] = 2, 3  # nothing was drawn there
  hidden = np.zeros((64, 2), np.float32)
  half = hidden.copy()
  half[1] = np.log(3), 0  # three quarters to one quarter
  seen = [
      precision.Seen(jnp.asarray(h), np.full(64, lp, np.float32), r)
      for h, lp, r in zip((hidden, half), (-1, -1.5), (routes, other))
  ]
  item = played([5, 6, 7, 8], [False, False, True, True], routes[:, :4])
  columns = precision._columns(item, *seen, [jnp.eye(2)] * 2, 1.0)
  np.testing.assert_array_equal(columns['before'], [1, 2])
  kl = 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)
  np.testing.assert_allclose(columns['kl'], [kl, 0], atol=1e-6)
  np.testing.assert_array_equal(columns['dlogp'], [0.5, 0.5])
  np.testing.assert_array_equal(columns['slots'], [[1, 0], [0, 0.5]])
  np.testing.assert_array_equal(columns['experts'], [[0, 0], [0, 0.5]])
  figures = precision._figures(columns)
  assert figures['positions'] == 2 and figures['top1'] == 1
  assert figures['slots'] == 3 / 8 and figures['experts'] == 1 / 8
  assert precision._layers(columns) == [
      {'slots': 0.5, 'experts': 0},
      {'slots': 0.25, 'experts': 0.25},
  ]


def test_buckets_by_hand():
  before = np.asarray([0, 63, 64, 127, 200])
  columns = dict(before=before, kl=np.arange(5.0), dlogp=np.ones(5))
  columns |= dict(top1=before > 99, slots=np.zeros((5, 0)))
  columns |= dict(experts=np.zeros((5, 0)))
  found = [
      (b['from'], b['to'], b['positions'], b['kl'], b['top1'])
      for b in precision._buckets(columns, 192 + 64)
  ]
  assert found == [
      (0, 64, 2, 0.5, 0),
      (64, 128, 2, 2.5, 0.5),
      (128, 256, 1, 4, 1),
  ]


def test_a_report_of_rollouts():
  cfg = samples.config(**CFG)
  weights = samples.weights(cfg)
  report = precision.measure(
      cfg, weights, context=128, sequences=2, own=8, prompts=[[1, 2, 3]]
  )
  assert report['positions'] == 2 * 125
  assert sum(b['positions'] for b in report['buckets']) == 250
  assert [b['to'] for b in report['buckets']] == [64, 128]
  # The precisions differ from each other, not from themselves.
  assert 1e-5 < report['kl'] < 0.5
  assert 0 < report['mean_abs_dlogp'] < report['max_abs_dlogp']
  assert 0 < report['experts'] <= report['slots'] < 0.5
  assert report['exact'] == {
      name: dict(
          positions=2 * n, unequal_bits=0, routed_tokens=2 * 127, route_flips=0
      )
      for name, n in (('bfloat16', 125), ('fp8', 8))
  }
  assert report['holds']
  text = precision.table(report)
  assert 'bfloat16 against fp8: 2 rollouts of 128 tokens' in text
  assert 'fp8 with itself: 16 positions, 0 unequal_bits' in text
  assert text.endswith('\nexact with themselves')
  text = precision.table(report | dict(holds=False))
  assert text.endswith('\nNOT exact')


def test_what_differs_is_counted():
  arm = precision.Arm(samples.config(**CFG), samples.weights(samples.config()))
  routes = np.full((4, 2, 2), 1, np.int16)
  routes[3] = -1  # the last token was never read
  seen = precision.Seen(
      jnp.zeros((64, 2)),
      np.full(64, -1, np.float32),
      np.ones((2, 64, 2), np.int32),
  )
  item = played([0, 1, 2, 3], [False, False, True, True], routes)
  item.logp[2:] = -1
  count = lambda: tuple(arm.unequal([item], [seen]).values())
  assert count() == (2, 0, 3, 0)
  item.logp[3] = np.nextafter(np.float32(-1), np.float32(0))
  item.routes[0, 1] = 1, 0
  assert count() == (2, 1, 3, 1)


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        (dict(a='fp8'), "a='fp8', b='fp8': two precisions"),
        (dict(sequences=0), 'sequences=0: at least 1'),
        (dict(temperature=0), 'temperature=0: allowed is above 0'),
        (dict(context=72), 'context=72: a multiple of 64'),
        (dict(context=100), 'max_context=100: allowed is a multiple of page'),
        (dict(b='int8'), "precision='int8': allowed is one of"),
        (dict(context=64, own=48), 'own=48: allowed are 1..47, with prompts'),
    ],
)
def test_bad_input(options, match):
  cfg = samples.config(**CFG)
  with pytest.raises(ValueError, match=match):
    precision.measure(cfg, samples.weights(cfg), **options)
