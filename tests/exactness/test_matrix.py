"""One recording, every way to sample it again and to compute it again.

256 sequences are drawn at once. Engines of other sizes, with other steps and
other pages, with prefixes that are known, evicted or branched from, must record
the same tokens, log-probs and experts; the learner must find them in packings,
microbatches and gradient programs of many kinds.
"""

import collections
import dataclasses

import numpy as np
import pytest

from agentic_rl.diagnostics import traffic
from agentic_rl.rollout import engine as engine_lib
from tests.exactness import arms
from tests.rollout import samples

CFG = samples.config()
SCRIPTS = samples.traffic(CFG, 256, 6)
DRAWN = sum(sum(s.draws) for s in SCRIPTS)
AT_ONCE = dict(
    max_sequences=256, pool_pages=256 * 8, steps=((256, 256), (768, 320))
)


def play(scripts, **options):
  """Plays scripts on a fresh engine; returns it and the recording."""
  engine = samples.make_engine(CFG, **options)
  return engine, samples.play(engine, scripts)


@pytest.fixture(scope='module')
def recorded():
  engine, played = play(SCRIPTS, **AT_ONCE)
  assert engine.pages.hits == 0  # no page is full when the prompts come
  assert engine.pages.peak > 256  # and all of them were live at once
  return played


def assert_recorded(played, recorded):
  """Fails unless a part of the recording was made again to the bit."""
  samples.assert_same(played, {name: recorded[name] for name in played})


# --- the sampler's side ---


@pytest.mark.parametrize(
    ('count', 'options'),
    [
        (8, dict(max_sequences=1, pool_pages=24, steps=((64, 8),))),
        (60, dict(steps=((64, 16),))),
        (60, dict(steps=((192, 40),))),
        pytest.param(
            256,
            dict(max_sequences=64, pool_pages=300, steps=((128, 72),)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=['batch-1', 'batch-8-small-steps', 'batch-8-large-steps', 'batch-64'],
)
def test_batch_steps_pages_hits_and_evictions(recorded, count, options):
  """Other companies, chunks and pages; prefixes found, missed and evicted."""
  scripts = SCRIPTS[:count]
  order = np.random.default_rng(count).permutation(count)
  engine, played = play([scripts[i] for i in order], **options)
  assert engine.pages.hits > 0
  assert engine.pages.misses > engine.pages.num_pages  # some were evicted
  assert_recorded(played, recorded)


def test_a_known_prefix_and_a_group_that_shares_it(recorded):
  """A prompt is read once, by the first of its group to come."""
  shared = collections.Counter(s.prompt for s in SCRIPTS)
  prompt = max(shared, key=lambda p: (shared[p] > 9) * len(p))
  group = [s for s in SCRIPTS if s.prompt == prompt][:6]
  pages = (len(prompt) - 1) // CFG.page
  engine = samples.make_engine(CFG)
  first = samples.play(engine, group[:1])
  assert engine.pages.hits == 0
  rest = samples.play(engine, group[1:])
  assert engine.pages.hits >= 5 * pages > 0
  assert_recorded(first | rest, recorded)
  again = samples.play(engine, group[:1])  # now its own turns are known, too
  assert_recorded(again, recorded)
  engine.load_params(engine.weights, 1)  # and now nothing is
  hits = engine.pages.hits
  assert_recorded(samples.play(engine, group[:1]), recorded)
  assert engine.pages.hits == hits


def test_a_branch_from_a_prefix():
  """A prompt that goes on from what another drew; case 8: routes come along."""
  engine, played = play(SCRIPTS[:7])
  branches, cuts = [], {}
  for script in SCRIPTS[:7]:
    item, name = played[script.rollout_id], 1000 + script.rollout_id
    drawn = np.flatnonzero(item.sampled)
    cut = int(drawn[2 * len(drawn) // 3]) + 1
    if cut < CFG.max_context - 4:
      prompt = tuple(item.tokens[:cut].tolist())
      draws = (min(9, CFG.max_context - cut),)
      branches.append(samples.Script(name, prompt, draws))
      cuts[name] = cut
  assert len(branches) == 7
  hits = engine.pages.hits
  grown = samples.play(engine, branches)
  assert engine.pages.hits - hits > len(branches)
  _, missed = play(branches)  # little is known there
  samples.assert_same(grown, missed)
  for name, item in grown.items():
    parent, cut = played[name - 1000], cuts[name]
    np.testing.assert_array_equal(
        item.routes[: cut - 1], parent.routes[: cut - 1]
    )
    item.sampled[:cut] = parent.sampled[:cut]
    item.logp[:cut] = parent.logp[:cut]
  examples = traffic.examples(branches, grown)
  drawn = sum(int(e.sampled.sum()) for e in examples)
  check = arms.check_update(CFG, (2, 64))
  assert check(samples.weights(CFG), examples) == (drawn, 0, 0)


# --- the learner's side ---


# program, (rows, tokens of a row), remat.
QUICK = [
    (arms.check_forward, (1, 64), False),
    (arms.check_update, (8, 128), True),
]
SLOW = [
    (arms.check_forward, (16, 64), True),
    (arms.check_update, (1, 64), False),
    (arms.check_update, (32, 128), False),
]


@pytest.mark.parametrize(
    ('check', 'packing', 'remat'),
    QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_packings_microbatches_and_remat(recorded, check, packing, remat):
  """Cases 1 and 2: microbatches of 64 to 4096 tokens, rows in any order."""
  cfg = dataclasses.replace(CFG, remat=remat)
  examples = arms.shuffled(traffic.examples(SCRIPTS, recorded))
  found = check(cfg, packing)(samples.weights(CFG), examples)
  assert found == (DRAWN, 0, 0)


def test_temperature_and_support():
  """Cases 3 and 4: the whole distribution at the sampler's temperature."""
  sampling = engine_lib.Sampling(temperature=0.7, top_k=6, top_p=0.8)
  _, played = play(SCRIPTS[:24], sampling=sampling, steps=((64, 16),))
  examples = traffic.examples(SCRIPTS[:24], played)
  drawn = sum(sum(s.draws) for s in SCRIPTS[:24])
  weights = samples.weights(CFG)
  check = arms.check_forward(CFG, (2, 64), 0.7)
  assert check(weights, examples) == (drawn, 0, 0)
  _, unequal, flips = arms.check_forward(CFG, (2, 64))(weights, examples)
  assert unequal > 0.9 * drawn and flips == 0  # the comparison can fail


def test_enough_is_compared():
  """Ten thousand positions by default: each test above compares all tokens."""
  assert DRAWN * len(QUICK) >= 10**4


# --- a million ---

# precision: engine, [(program, packing, remat)].
MILLION = {
    'float32': (
        dict(
            max_sequences=128, pool_pages=1100, steps=((128, 128), (512, 192))
        ),
        [
            (arms.check_forward, (8, 64), False),
            (arms.check_forward, (16, 128), True),
            (arms.check_update, (16, 64), True),
        ],
    ),
    'bfloat16': (
        dict(
            max_sequences=256, pool_pages=2100, steps=((256, 256), (768, 320))
        ),
        [
            (arms.check_forward, (16, 128), False),
            (arms.check_update, (32, 64), False),
            (arms.check_update, (8, 128), True),
        ],
    ),
}
SCRIPTS_A_ROUND = 900
HALF = 500_000  # positions of each precision


@pytest.mark.slow
@pytest.mark.long
def test_a_million_positions():
  """Half of each precision; one test, so that one process counts them all."""
  total = tokens = 0
  for precision, (options, programs) in MILLION.items():
    cfg = samples.config(layers=2, precision=precision)
    weights = samples.weights(cfg)
    engine = samples.make_engine(cfg, weights_=weights, **options)
    checks = [
        check(dataclasses.replace(cfg, remat=remat), packing)
        for check, packing, remat in programs
    ]
    positions = number = 0
    while positions < HALF:
      first = SCRIPTS_A_ROUND * number
      scripts = samples.traffic(cfg, SCRIPTS_A_ROUND, number, first)
      number += 1
      examples = traffic.examples(scripts, samples.play(engine, scripts))
      drawn = sum(sum(s.draws) for s in scripts)
      for check in checks:
        assert check(weights, arms.shuffled(examples)) == (drawn, 0, 0)
        positions += drawn
      tokens += drawn
    assert engine.pages.hits > 100 and engine.pages.misses > 10_000
    print(f'{precision}: {positions} positions')
    total += positions
  print(f'{total} positions of {tokens} tokens')
  assert total >= 2 * HALF >= 10**6
