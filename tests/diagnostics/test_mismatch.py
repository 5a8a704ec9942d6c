"""The statistics of a mismatch: by hand, and on data of known kinds."""

import json
import math

import numpy as np
import pytest

from agentic_rl.diagnostics import mismatch


def compared(rows, routes=(), slots=2, layers=3):
  """Builds from (sequence, context, sampler, learner[, hits]) rows."""
  columns = list(zip(*rows))
  hits = columns[4] if len(columns) > 4 else []
  return mismatch.Compared(
      sequences_P=np.array(columns[0]),
      contexts_P=np.array(columns[1]),
      sampler_P=np.array(columns[2], np.float32),
      learner_P=np.array(columns[3], np.float32),
      hits_P=np.array(hits),
      route_contexts_R=np.array([c for c, _ in routes], np.int64),
      flips_RL=np.array([f for _, f in routes], np.int16).reshape(
          len(routes), layers
      ),
      slots=slots,
  )


# Powers of two: float32 holds the log-probs without rounding.
ROWS = [
    (0, 3, -1.0, -1.0, 1.0),
    (0, 9, -2.0, -1.875, 0.5),
    (0, 20, -2.0, -1.75, 1.0),
    (4, 15, -4.0, -4.0625, 1.0),
    (4, 40, -1.0, -1.0, 0.0),
]
ROUTES = [(0, [0, 0, 0]), (15, [1, 0, 2]), (16, [0, 0, 2])]


def test_figures_by_hand():
  report = mismatch.summary(compared(ROWS, ROUTES))
  first, second, third = report['buckets']
  assert [(b['from'], b['to']) for b in report['buckets']] == [
      (0, 16), (16, 32), (32, 64),
  ]  # fmt: skip
  assert [b['positions'] for b in report['buckets']] == [3, 1, 1]
  assert first['unequal_bits'] == 2
  assert first['max_abs_dlogp'] == 0.125
  assert first['mean_abs_dlogp'] == pytest.approx((0.125 + 0.0625) / 3)
  deltas = [0.0, 0.125, -0.0625]
  assert first['kl_k1'] == pytest.approx(-sum(deltas) / 3)
  k3 = sum(math.exp(d) - 1 - d for d in deltas) / 3
  assert first['kl_k3'] == pytest.approx(k3)
  # e^.125 = 1.133 leaves both bands, e^-.0625 = .939 the narrow one only.
  assert first['outside_10_percent'] == pytest.approx(1 / 3)
  assert first['outside_1_percent'] == pytest.approx(2 / 3)
  assert first['topk_hit_rate'] == pytest.approx(2.5 / 3)
  # Sums up to the last position of each sequence below 16: .125 and -.0625.
  errors = [math.exp(0.125) - 1, math.exp(0.0625) - 1]
  assert first['multiplicative_error'] == pytest.approx(sum(errors) / 2)
  assert first['multiplicative_error_max'] == pytest.approx(errors[0])
  # Sequence 0 alone has positions in the second, 4 alone in the third.
  assert second['multiplicative_error'] == pytest.approx(math.exp(0.375) - 1)
  assert third['multiplicative_error'] == pytest.approx(errors[1])
  assert (third['unequal_bits'], third['topk_hit_rate']) == (0, 0.0)
  assert first['route_flips'] == 3 and second['route_flips'] == 2
  assert first['flip_rate_by_layer'] == [1 / 4, 0, 2 / 4]
  assert second['flip_rate_by_layer'] == [0, 0, 1]
  assert third['flip_rate_by_layer'] == [0, 0, 0]
  assert (report['positions'], report['unequal_bits']) == (5, 3)
  assert report['route_flips'] == 5 and report['routed_tokens'] == 3
  assert report['flip_rate_by_layer'] == [1 / 6, 0, 4 / 6]
  assert report['max_abs_dlogp'] == 0.25
  ends = [math.exp(0.375) - 1, errors[1]]
  assert report['multiplicative_error'] == pytest.approx(sum(ends) / 2)


def test_without_routes_and_hits():
  report = mismatch.summary(compared([r[:4] for r in ROWS], layers=0))
  assert report['topk_hit_rate'] is None
  assert report['route_flips'] == 0 and report['flip_rate_by_layer'] == []
  assert report['unequal_bits'] == 3


def test_a_zero_of_another_sign_is_unequal():
  report = mismatch.summary(compared([(0, 1, -0.0, 0.0)]))
  assert report['unequal_bits'] == 1 and report['verdict'] == 'flat'
  assert report['max_abs_dlogp'] == 0


def test_sums_that_overflow_stay_numbers():
  report = mismatch.summary(compared([(0, 1, -1e5, 0.0), (0, 2, 0.0, -1e5)]))
  assert math.isfinite(report['kl_k3']) and report['kl_k3'] > 1e100
  assert math.isfinite(report['multiplicative_error_max'])
  many = mismatch.summary(compared([(i, 1, -1e30, 0.0) for i in range(30_000)]))
  json.dumps(many, allow_nan=False)


@pytest.mark.parametrize(
    ('longest', 'edges'),
    [(0, [0, 16]), (15, [0, 16]), (16, [0, 16, 32]), (255, [0, 16, 32, 64, 128, 256])],
)  # fmt: skip
def test_bucket_edges(longest, edges):
  assert mismatch.bucket_edges(longest) == edges


def test_joining_parts_changes_nothing():
  parts = [compared(ROWS[:3], ROUTES[:1]), compared(ROWS[3:], ROUTES[1:])]
  whole = mismatch.summary(compared(ROWS, ROUTES))
  assert mismatch.summary(mismatch.join(parts)) == whole


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        ([(1, 3, 0, 0), (0, 4, 0, 0)], 'in order'),
        ([(0, 3, 0, 0), (0, 3, 0, 0)], 'in order'),
        ([(0, 3, np.nan, 0)], 'sampler_P holds .* not finite'),
        ([(0, 3, 0, -np.inf)], 'learner_P holds .* not finite'),
    ],
)
def test_bad_positions(rows, message):
  with pytest.raises(ValueError, match=message):
    compared(rows)


def test_no_positions():
  empty = np.zeros(0)
  with pytest.raises(ValueError, match='0 positions'):
    mismatch.Compared(*[empty] * 6, np.zeros((0, 1)), 1)


# The slope and the verdict.


def synthetic(seed, *, growth=0.0, sequences=60, length=200, noise=1e-3):
  """|δ| = noise · (1 + growth · context / length), correlated in a sequence."""
  rng = np.random.default_rng(seed)
  number = np.repeat(np.arange(sequences), length)
  context = np.tile(np.arange(1, length + 1), sequences)
  level = rng.lognormal(0, 0.5, sequences)[number]
  size = noise * level * rng.lognormal(0, 0.5, len(number))
  size = size * (1 + growth * context / length)
  learner = rng.normal(-2, 0.3, len(number)).astype(np.float32)
  sampler = learner + (size * rng.choice([-1, 1], len(number)))
  return compared(list(zip(number, context, sampler, learner)))


@pytest.mark.parametrize('sequences', [60, 3])
@pytest.mark.parametrize(
    ('growth', 'expected'), [(0.0, 'flat'), (1.5, 'accumulating'), (-0.8, 'flat')]
)  # fmt: skip
def test_verdicts(growth, expected, sequences):
  data = synthetic(1, growth=growth, sequences=sequences)
  report = mismatch.summary(data)
  assert report['verdict'] == expected
  fitted = report['slope']
  assert fitted['low_per_1k'] < fitted['per_1k'] < fitted['high_per_1k']
  assert fitted['clusters'] == (60 if sequences == 60 else 21)


def test_equal_sides_are_exact():
  data = synthetic(0, noise=0.0)
  report = mismatch.summary(data)
  assert report['verdict'] == 'exact' and report['unequal_bits'] == 0
  assert report['slope']['per_1k'] == report['slope']['high_per_1k'] == 0
  for b in report['buckets']:
    assert b['kl_k3'] == b['max_abs_dlogp'] == b['multiplicative_error'] == 0


def test_one_flip_or_one_bit_is_not_exact():
  fitted = {'low_per_1k': -1.0}
  assert mismatch.verdict(0, 0, fitted) == 'exact'
  assert mismatch.verdict(1, 0, fitted) == 'flat'
  assert mismatch.verdict(0, 1, fitted) == 'flat'
  assert mismatch.verdict(0, 1, {'low_per_1k': 0.1}) == 'accumulating'
  assert mismatch.verdict(0, 1, {'low_per_1k': None}) == 'flat'


def test_the_slope_is_that_of_least_squares():
  rng = np.random.default_rng(0)
  number = np.repeat(np.arange(30), 7)
  x = np.tile(np.arange(7), 30) * 100 + number
  y = 0.5 + 2e-3 * x + rng.normal(size=len(x))
  found = mismatch.slope(number, x, y, seed=0)
  assert found['per_1k'] == pytest.approx(1000 * np.polyfit(x, y, 1)[0])
  assert found == mismatch.slope(number, x, y, seed=0)  # seeded
  other = mismatch.slope(number, x, y, seed=1)
  assert other['per_1k'] == found['per_1k']
  assert other['low_per_1k'] != found['low_per_1k']


def test_no_slope_at_one_context():
  number = np.arange(40)
  found = mismatch.slope(number, np.full(40, 9), np.ones(40), seed=0)
  assert found['per_1k'] is found['low_per_1k'] is found['high_per_1k'] is None


def test_the_interval_covers_the_slope():
  """Levels differ by sequence: tokens of one are far from independent."""
  covered = naive = 0
  trials = 200
  for trial in range(trials):
    rng = np.random.default_rng(trial)
    sizes = rng.integers(5, 60, 40)
    number = np.repeat(np.arange(40), sizes)
    x = np.concatenate([np.arange(n) + rng.integers(100) for n in sizes])
    y = 3e-3 * x + rng.normal(size=40)[number] + 0.2 * rng.normal(size=len(x))
    found = mismatch.slope(number, x, y, seed=trial, resamples=300)
    covered += found['low_per_1k'] <= 3 <= found['high_per_1k']
    deviation = x - x.mean()
    rest = y - y.mean() - found['per_1k'] / 1000 * deviation
    error = 1000 * rest.std() / np.sqrt((deviation**2).sum())
    naive += abs(found['per_1k'] - 3) <= 1.96 * error
  assert 0.88 * trials <= covered <= 0.99 * trials
  assert naive < 0.6 * trials  # as if all tokens were independent
