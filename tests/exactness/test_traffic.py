"""Sampler and learner agree to the bit, under traffic that mixes everything.

Random sequences join and leave, read prompts in chunks beside others that
decode, share prefixes, lose pages to eviction and take permuted ones. Then the
same tokens go through the plain forward and through the gradient program, in
more than one packing. Every drawn token's log-prob and every read token's
experts are compared.
"""

import functools

import jax
import numpy as np
import pytest

from agentic_rl import numerics
from agentic_rl.diagnostics import traffic
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.policy import config as config_lib
from kernels_pallas import numerics as nx
from tests.rollout import samples

TEMPERATURE = 1.0
NARROW, WIDE = (2, 64), (4, 128)  # rows of a microbatch, tokens of a row
SMALL = dict(max_context=64)
WIDER = dict(width=64, heads=4, kv_heads=2, expert_width=32, experts=8)
COMPARED = {}  # positions by arm


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


def make_learner(cfg, rows, row_tokens):
  return update.Learner(
      cfg,
      update.LossConfig(temperature=TEMPERATURE),
      optimizer_lib.make('adam', learning_rate=1e-3, steps=9),
      rows=rows,
      row_tokens=row_tokens,
  )


def check_forward(cfg, weights, examples, packing):
  """Returns (compared, unequal, flips) of the plain forward."""
  one = make_learner(cfg, *packing)
  program = nx.jit(
      functools.partial(
          update.policy_logprobs, cfg=cfg, temperature=TEMPERATURE
      ),
      exact=cfg.exact,
  )
  compared = unequal = flips = 0
  for part in pack_lib.microbatches(one.pack(examples), one.rows):
    inputs = update._inputs(part)
    logp, _, routes = program(weights, inputs)
    places = inputs['rows'][inputs['rows'] < inputs['tokens'].size]
    recorded = inputs['logp_behavior'][places]
    assert inputs['sampled'][places].all()
    compared += len(places)
    unequal += numerics.unequal_bits(np.asarray(logp)[: len(places)], recorded)
    known = inputs['routes'] >= 0
    found = np.asarray(routes).transpose(1, 0, 2)
    flips += int((known & (found != inputs['routes'])).sum())
  return compared, unequal, flips


def check_update(cfg, weights, examples, packing):
  """Returns (compared, unequal, flips) of the gradient program."""
  one = make_learner(cfg, *packing)
  own = samples.copy(weights)
  _, _, stats = one.update(own, one.init(own), one.pack(examples))
  unequal = int(stats['mismatch/unequal_bits'])
  if not unequal:
    assert stats['mismatch/max_abs_dlogp'] == 0
    assert stats['mismatch/max_abs_ratio_dev'] == 0
  assert np.isfinite(stats['grad_norm']) and stats['grad_norm'] > 0
  return (
      int(stats['mismatch/compared']),
      unequal,
      int(stats['router/flips']),
  )


def shuffled(examples):
  order = np.random.default_rng(1).permutation(len(examples))
  return [examples[i] for i in order]


def compare(name, cfg, scripts, programs, **options):
  """Counts what differs in each program; nothing may."""
  weights, examples = generate(cfg, scripts, **options)
  drawn = sum(int(e.sampled.sum()) for e in examples)
  for program, packing in programs:
    batch = examples if packing == NARROW else shuffled(examples)
    found = program(cfg, weights, batch, packing)
    print(f'{name} {program.__name__} {packing}: {found}')
    assert found == (drawn, 0, 0), (program.__name__, packing)
  COMPARED[name] = drawn, drawn * len(programs)
  print(f'{name}: {drawn} drawn tokens, {COMPARED[name][1]} comparisons')


ARMS = {
    'float32': (
        dict(SMALL),
        [
            (check_forward, NARROW), (check_forward, WIDE),
            (check_update, NARROW),
        ],
    ),
    'bfloat16-wider-remat': (
        SMALL | WIDER | dict(precision='bfloat16', remat=True),
        [(check_forward, NARROW), (check_update, WIDE)],
    ),
}  # fmt: skip
# The other halves of the pairs.
MORE_ARMS = {
    'float32-wider-remat': (
        SMALL | WIDER | dict(remat=True),
        [(check_forward, WIDE), (check_update, NARROW)],
    ),
    'bfloat16': (
        SMALL | dict(precision='bfloat16'),
        [(check_forward, WIDE), (check_update, NARROW)],
    ),
    'fp8-mixed-layers-remat': (
        SMALL
        | WIDER
        | dict(precision='fp8', pattern='wbf', layers=4, dense_layers=1)
        | dict(dense_width=128, shared_width=16, remat=True),
        [(check_forward, WIDE), (check_update, NARROW)],
    ),
    'float32-mixed-layers': (
        SMALL
        | dict(pattern='wbf', layers=4, dense_layers=1, dense_width=48)
        | dict(shared_width=16, gating='sigmoid', tied=True),
        [(check_forward, NARROW), (check_update, WIDE)],
    ),
}


@pytest.mark.parametrize('name', ARMS)
def test_no_bit_differs(name):
  fields, programs = ARMS[name]
  cfg = samples.config(**fields)
  seed = list(ARMS).index(name)
  compare(name, cfg, samples.traffic(cfg, 210, seed), programs)


SINKS = dict(attention_sink=True, soft_cap=3.0, sink_page=True)


@pytest.mark.parametrize(
    ('precision', 'impl'),
    [
        ('bfloat16', 'xla'),
        pytest.param('float32', 'xla', marks=pytest.mark.slow),
        pytest.param('bfloat16', 'pallas', marks=pytest.mark.slow),
        pytest.param('float32', 'pallas', marks=pytest.mark.slow),
    ],
)
def test_no_bit_differs_with_sinks(precision, impl):
  """Sink logits, capped scores, and the first page always in sight."""
  cfg = samples.config(**SMALL | SINKS, precision=precision, impl=impl)
  scripts = samples.traffic(cfg, 60, 7)
  compare(f'sinks-{precision}-{impl}', cfg, scripts, [(check_update, NARROW)])


# Two blocks of rows, or of columns, in every matrix.
FP8 = SMALL | dict(
    precision='fp8',
    layers=2,
    width=256,
    heads=4,
    kv_heads=2,
    head_width=32,
    expert_width=32,
)


@pytest.mark.parametrize(
    'impl', ['xla', pytest.param('pallas', marks=pytest.mark.slow)]
)
def test_no_bit_differs_with_products_of_eight_bits(impl):
  cfg = samples.config(**FP8, impl=impl)
  scripts = samples.traffic(cfg, 60, 9)
  compare(f'fp8-{impl}', cfg, scripts, [(check_update, NARROW)])


@pytest.mark.slow
@pytest.mark.parametrize('name', MORE_ARMS)
def test_no_bit_differs_in_more_policies(name):
  fields, programs = MORE_ARMS[name]
  cfg = samples.config(**fields)
  compare(name, cfg, samples.traffic(cfg, 210, 2), programs)


@pytest.mark.slow
@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
def test_no_bit_differs_with_the_pallas_kernels(precision):
  """The TPU's kernels, interpreted, in the engine and in the learner."""
  cfg = samples.config(**SMALL, precision=precision, impl='pallas')
  compare(
      f'pallas-{precision}',
      cfg,
      samples.traffic(cfg, 210, 5),
      [(check_forward, WIDE), (check_update, NARROW)],
  )


def test_enough_was_compared():
  """Ten thousand drawn tokens, each with all its layers' experts."""
  if not COMPARED.keys() >= ARMS.keys():
    pytest.skip('needs all arms in one process')
  drawn, comparisons = np.sum([COMPARED[name] for name in ARMS], 0)
  print(f'{drawn} drawn tokens, {comparisons} comparisons')
  assert drawn >= 10**4


def test_the_check_can_fail():
  """The control arm: the same code with XLA's own order of summation."""
  cfg = samples.config(**SMALL | WIDER, exact=False)
  scripts = samples.traffic(cfg, 60)
  weights, examples = generate(cfg, scripts, steps=((64, 16),))
  compared, unequal, _ = check_forward(cfg, weights, examples, NARROW)
  print(f'control: {unequal} of {compared} differ')
  assert unequal > compared // 20


def test_one_wrong_weight_is_seen():
  """One bit of one weight of the last norm: no route, but some log-probs."""
  cfg = samples.config(**SMALL)
  weights, examples = generate(cfg, samples.traffic(cfg, 40))
  norm = np.array(weights['final_norm'])
  norm[3:4].view(np.int32)[0] ^= 1
  wrong = weights | {'final_norm': jax.numpy.asarray(norm)}
  compared, unequal, flips = check_forward(cfg, wrong, examples, NARROW)
  assert 10 < unequal < compared and flips == 0


@pytest.mark.slow
@pytest.mark.parametrize('precision', ['float32', 'bfloat16', 'fp8'])
def test_no_bit_differs_in_the_default_shape(precision):
  """Eight layers of width 128; two precisions compare 10^5 tokens."""
  cfg = config_lib.PolicyConfig(precision=precision)
  scripts = samples.traffic(cfg, 720)
  assert sum(sum(s.draws) for s in scripts) >= 50_000
  compare(
      f'default-{precision}',
      cfg,
      scripts,
      [(check_forward, (8, 256)), (check_update, (16, 256))],
      max_sequences=32,
      pool_pages=400,
      steps=((64, 40), (192, 64)),
  )
