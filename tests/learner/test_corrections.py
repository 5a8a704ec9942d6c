"""Corrections by hand, their errors, and that they do nothing where all agree."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.learner import corrections
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.parallel import mesh
from agentic_rl.policy import model
from configs import common
from configs import swe
from tests.rollout import samples

LOG2 = np.log(2)
# Two sequences: ratios 2, 1/2, 3 and 1/2, 1/4; one token was not drawn.
RATIOS = [2.0, 0.5, 1.0, 3.0, 0.5, 0.25]
DRAWN = [True, True, False, True, True, True]
SEQUENCE = [0, 0, 0, 0, 1, 1]


def sums_of(sequence):
  return functools.partial(
      corrections.sequence_sums, sequence_R=jnp.asarray(sequence)
  )


def weigh(name, **options):
  weights, capped = corrections.weigh(
      name,
      options,
      jnp.asarray(np.log(RATIOS) - 5, jnp.float32),
      jnp.where(jnp.asarray(DRAWN), -5.0, 77.0),  # 77: what was never drawn
      jnp.asarray(DRAWN),
      sums_of(SEQUENCE),
  )
  return np.asarray(weights), np.asarray(capped).tolist()


BY_HAND = [
    ('none', {}, [1] * 6, [0] * 6),
    ('tis_token', dict(cap=2.5), [2, 0.5, 1, 2.5, 0.5, 0.25],
     [0, 0, 0, 1, 0, 0]),
    ('tis_token', dict(cap=1.5), [1.5, 0.5, 1, 1.5, 0.5, 0.25],
     [1, 0, 0, 1, 0, 0]),
    # The products are 3 and 1/8.
    ('tis_sequence', dict(cap=9.0), [3] * 4 + [0.125] * 2, [0] * 6),
    ('tis_sequence', {}, [2] * 4 + [0.125] * 2, [1] * 4 + [0] * 2),
    ('mask_token', dict(low=0.4, high=2.5), [2, 0.5, 1, 0, 0.5, 0],
     [0] * 6),
    ('mask_sequence', dict(low=0.2, high=3.5), [3] * 4 + [0] * 2, [0] * 6),
    ('mask_sequence', dict(low=0.1, high=2.5), [0] * 4 + [0.125] * 2,
     [0] * 6),
    # 3^(1/3) of the three drawn tokens, 8^(-1/2).
    ('mask_geometric', dict(low=0.4, high=1.5),
     [3 ** (1 / 3)] * 4 + [0] * 2, [0] * 6),
    ('mask_geometric', dict(low=0.3, high=1.4), [0] * 4 + [8**-0.5] * 2,
     [0] * 6),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'options', 'expected', 'capped'), BY_HAND)
def test_by_hand(name, options, expected, capped):
  weights, bound = weigh(name, **options)
  # A product is a sum of logarithms of size ten.
  np.testing.assert_allclose(weights, expected, rtol=3e-6)
  assert bound == [bool(c) for c in capped]


def test_every_correction_is_tested():
  assert {name for name, *_ in BY_HAND} == set(corrections.CORRECTIONS)


def test_extreme_ratios_stay_finite():
  gap = jnp.asarray([300.0, -300.0, 0.0])
  drawn, own = jnp.ones(3, bool), sums_of([0, 1, 2])
  for name, fun in corrections.CORRECTIONS.items():
    weights, _ = fun(gap, drawn, own)
    assert np.isfinite(weights).all(), name
    assert weights[2] == 1, name
  assert corrections.tis_token(gap, drawn, own, cap=1e9)[0][0] == 1e9
  assert corrections.mask_token(gap, drawn, own)[0].tolist() == [0, 0, 1]


def test_sums_over_sequences():
  rng = np.random.default_rng(0)
  lengths = [1, 5, 1, 1, 40, 3, 13]
  sequence = np.repeat(np.arange(7), lengths)
  x = rng.normal(size=64).astype(np.float32)
  found = np.asarray(jax.jit(corrections.sequence_sums)(x, sequence))
  for number in range(7):
    own = found[sequence == number]
    assert len(set(own.tolist())) == 1  # to the bit
    np.testing.assert_allclose(own[0], x[sequence == number].sum(), atol=1e-5)
  # What lies elsewhere does not matter, not even infinity.
  x[sequence != 4] = np.inf
  again = np.asarray(jax.jit(corrections.sequence_sums)(x, sequence))
  np.testing.assert_array_equal(again[sequence == 4], found[sequence == 4])


def test_metrics_by_hand():
  weights = jnp.asarray([2.0, 0.0, 1.0, 1.0, 9.0])
  capped = jnp.asarray([True, False, False, False, True])
  counted = jnp.asarray([True, True, True, True, False])
  sums = corrections.stats(weights, capped, counted)
  found = corrections.metrics({k: float(v) for k, v in sums.items()})
  assert found == {
      'correction/mean_weight': 1.0,
      'correction/truncated_share': 0.25,
      'correction/masked_share': 0.25,
      'correction/ess': pytest.approx(16 / (4 * 6)),
  }
  assert corrections.metrics(dict.fromkeys(corrections.COUNTS, 0.0)) == {}


CHOICES = [
    *itertools.product(corrections.CORRECTIONS, ['learner']),
    ('none', 'behavior'),
]


@functools.cache
def plain_gradient():
  return gradient(update.LossConfig(), EXACT, EXACT, OWNERS)[0]


EXACT = -np.exp(np.random.default_rng(0).normal(size=512) * 2)
EXACT = EXACT.astype(np.float32)
OWNERS = np.repeat(np.arange(8), 64)


def gradient(loss, logp, recorded, sequence):
  rng = np.random.default_rng(3)
  advantages = rng.normal(size=len(logp)).astype(np.float32)
  weights = np.ones(len(logp), np.float32)
  drawn = np.ones(len(logp), bool)

  def value(logp):
    per_token, _, counts = update.token_loss(
        loss, logp, recorded, advantages, weights, drawn, sums_of(sequence)
    )
    return (weights * per_token).sum(), counts

  return jax.jit(jax.grad(value, has_aux=True))(logp)


@pytest.mark.parametrize(('name', 'anchor'), CHOICES)
def test_with_an_exact_sampler_nothing_changes(name, anchor):
  """The gradient of every choice is that of the plain loss, to the bit."""
  plain = plain_gradient()
  loss = update.LossConfig(anchor=anchor, correction=name)
  found, counts = gradient(loss, EXACT, EXACT, OWNERS)
  assert np.abs(plain).min() > 0
  np.testing.assert_array_equal(
      np.asarray(found).view(np.int32), np.asarray(plain).view(np.int32)
  )
  if name != 'none':
    stats = corrections.metrics({k: float(v) for k, v in counts.items()})
    assert stats == {
        'correction/mean_weight': 1,
        'correction/truncated_share': 0,
        'correction/masked_share': 0,
        'correction/ess': 1,
    }


def test_anchors_and_weights_in_the_gradient():
  """d loss / d log π is -w A: the ratio's own value when anchored there."""
  logp = np.float32(np.log([0.5, 0.5, 0.5]))
  recorded = np.float32(np.log([0.5, 0.125, 0.4]))
  advantages = np.float32([1.0, 2.0, -1.0])
  ones, drawn = np.ones(3, np.float32), np.ones(3, bool)

  def slope(**loss):
    loss = update.LossConfig(**loss)
    fun = lambda x: update.token_loss(
        loss, x, recorded, advantages, ones, drawn, sums_of([0] * 3)
    )[0].sum()
    return np.asarray(jax.grad(fun)(jnp.asarray(logp)))

  # Behaviour: ratios 1, 4 (clipped: no slope) and 1.25.
  np.testing.assert_allclose(slope(), [-1, 0, 1.25], rtol=1e-6)
  own = dict(anchor='learner')
  np.testing.assert_allclose(slope(**own), [-1, -2, 1], rtol=1e-6)
  np.testing.assert_allclose(
      slope(**own, correction='tis_token'), [-1, -4, 1.25], rtol=1e-6
  )
  np.testing.assert_allclose(
      slope(**own, correction='mask_token'), [-1, 0, 1.25], rtol=1e-6
  )
  five = slope(
      **own, correction='tis_sequence', correction_options=(('cap', 10.0),)
  )
  np.testing.assert_allclose(five, [-5, -10, 5], rtol=1e-6)


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        (dict(anchor='old'), "anchor='old': allowed are"),
        (dict(correction='tis'), "correction 'tis': allowed are"),
        (
            dict(correction='tis_token'),
            "anchor='behavior' with correction 'tis_token': .* count twice",
        ),
        (
            dict(anchor='learner', correction='none',
                 correction_options=(('cap', 2.0),)),
            "option 'cap' of correction 'none': allowed are",
        ),
        (
            dict(anchor='learner', correction='mask_token',
                 correction_options=(('cap', 2.0),)),
            r"option 'cap' .*: allowed are \['low', 'high'\]",
        ),
        (
            dict(anchor='learner', correction='tis_token',
                 correction_options=(('cap', 0.5),)),
            'cap=0.5 of correction',
        ),
        (
            dict(anchor='learner', correction='mask_sequence',
                 correction_options=(('low', 1.5),)),
            'low=1.5, high=2.0 of correction',
        ),
        (dict(routing_replay='all'), "routing_replay='all': allowed are"),
    ],
)  # fmt: skip
def test_bad_choices(options, match):
  with pytest.raises(ValueError, match=match):
    update.LossConfig(**options)


def test_the_config_offers_every_correction():
  """By name, with the function's own defaults; the chosen one does nothing."""
  config = swe.get_config().learner
  loss = update.LossConfig(
      config.loss.name,
      anchor=config.anchor,
      correction=config.correction.name,
      routing_replay=config.routing_replay,
  )
  assert loss == update.LossConfig()
  for name, fun in corrections.CORRECTIONS.items():
    config.correction.name = name
    options = common.options(config.correction)
    assert options == (fun.__kwdefaults__ or {})
    corrections.check(name, options, 'learner')


def test_sequences_of_packed_rows():
  """Neighbours in a row and the same number in two rows are told apart."""

  def example(length):
    sampled = np.arange(length) % 3 > 0
    zeros = np.zeros(length, np.float32)
    return pack_lib.Example(
        np.arange(length, dtype=np.int32), sampled.astype(np.float32), zeros,
        zeros, sampled,
    )  # fmt: skip

  lengths = (30, 17, 8, 40, 5)
  batch = pack_lib.pack(
      [example(n) for n in lengths], row_tokens=64, page=8, rows=2
  )
  inputs = inputs_lib.flatten(batch)
  used = inputs['rows'] < inputs['tokens'].size
  at = np.unravel_index(inputs['rows'][used], batch.tokens_BT.shape)
  numbers = inputs['sequence'][used]
  owner = batch.segments_BT[at]
  # One number a sequence, in runs.
  assert len(set(zip(numbers, owner))) == len(set(owner)) == 5
  assert (np.diff(numbers) >= 0).all()
  assert not set(inputs['sequence'][~used]) & set(numbers)
  # A batch that repeats its numbers in every row, as the row's own would.
  batch.segments_BT[batch.segments_BT >= 0] = 0
  again = inputs_lib.flatten(batch)['sequence']
  assert len(set(again[used])) >= 2


def packed(lengths, rows):
  rng = np.random.default_rng(2)

  def example(length):
    sampled = rng.random(length) < 0.6
    zeros = np.zeros(length, np.float32)
    return pack_lib.Example(
        np.arange(length, dtype=np.int32), sampled.astype(np.float32), zeros,
        -rng.random(length).astype(np.float32), sampled,
    )  # fmt: skip

  return pack_lib.pack(
      [example(n) for n in lengths], row_tokens=64, page=8, rows=rows
  )


@pytest.mark.parametrize('text', ['context=4', 'data=2,context=2', 'context=8'])
def test_sequences_that_a_mesh_cuts(text):
  """Each token's sum is that of its whole sequence, over all parts of its row."""
  batch = packed((50, 30, 17, 64, 8, 40, 5, 61), 8)
  parallel = mesh.make(text)

  def own(inputs):
    inputs = {k: v[0] for k, v in inputs.items()}
    take = lambda x: x.at[inputs['rows']].get(mode='fill', fill_value=0)
    found = corrections.sequence_sums(
        take(inputs['logp_behavior']) * take(inputs['sampled']),
        inputs['sequence'],
        inputs['tokens'].size * parallel.size('context'),
        parallel,
    )
    whole = jnp.zeros(inputs['tokens'].size)
    return whole.at[inputs['rows']].set(found, mode='drop')[None]

  spec = jax.sharding.PartitionSpec(mesh.AXES)
  inputs = inputs_lib.flatten(batch, parallel)
  found = jax.jit(parallel.map(own, (spec,), spec))(inputs)
  shards, parts = parallel.size(*mesh.ROW_AXES), parallel.size('context')
  found = np.asarray(found).reshape(shards, parts, 8 // shards, -1)
  found = found.swapaxes(1, 2).reshape(8, 64)
  assert batch.sampled_BT.sum() > 100
  for row in range(8):
    for segment in set(batch.segments_BT[row]) - {-1}:
      mine = (batch.segments_BT[row] == segment) & batch.sampled_BT[row]
      total = batch.logp_behavior_BT[row][mine].sum()
      np.testing.assert_allclose(found[row][mine], total, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['tis_sequence', 'mask_geometric'])
def test_a_stale_policy_on_a_mesh_that_cuts_sequences(name):
  """The same step as on one device, but for the order of sums."""
  cfg = samples.config(layers=2)
  rng = np.random.default_rng(4)
  examples = []
  for length in (50, 30, 17, 64, 8, 40):
    sampled = np.arange(length) % 3 > 0
    examples.append(
        pack_lib.Example(
            rng.integers(0, cfg.vocab, length).astype(np.int32),
            sampled.astype(np.float32),
            rng.normal(size=length).astype(np.float32),
            # Near the uniform policy's, so that no ratio is far from 1.
            np.float32(rng.normal(-np.log(cfg.vocab), 0.1, length)),
            sampled,
        )
    )

  def step(parallel):
    learner = update.Learner(
        cfg,
        update.LossConfig(anchor='learner', correction=name),
        optimizer_lib.make('adam', learning_rate=1e-3, steps=9),
        rows=4,
        row_tokens=64,
        parallel=parallel,
    )
    weights = jax.tree.map(lambda a: 0.1 * a, samples.weights(cfg))
    if parallel.mesh is not None:
      logical = model.logical_axes(cfg)
      weights = jax.device_put(weights, parallel.shardings(logical))
    batch = learner.pack(examples)
    return learner.update(weights, learner.init(weights), batch)[2]

  one, cut = step(mesh.SINGLE), step(mesh.make('context=4'))
  changed = {k: v for k, v in one.items() if k.startswith('correction/')}
  assert 0 < changed['correction/ess'] < 1
  for field in (*changed, 'loss', 'grad_norm'):
    np.testing.assert_allclose(cut[field], one[field], rtol=1e-4)
