"""Sampler and learner agree to the bit, under traffic that mixes everything.

Random sequences join and leave, read prompts in chunks beside others that
decode, share prefixes, lose pages to eviction and take permuted ones. Then the
same tokens go through the plain forward and through the gradient program, in
more than one packing. Every drawn token's log-prob and every read token's
experts are compared.
"""

import jax
import numpy as np
import pytest

from agentic_rl.policy import config as config_lib
from tests.exactness import arms
from tests.rollout import samples

NARROW, WIDE = (2, 64), (4, 128)  # rows of a microbatch, tokens of a row
SMALL = dict(max_context=64)
WIDER = dict(width=64, heads=4, kv_heads=2, expert_width=32, experts=8)
COMPARED = {}  # positions by arm


def compare(name, cfg, scripts, programs, **options):
  """Counts what differs in each program; nothing may."""
  weights, examples = arms.generate(cfg, scripts, **options)
  drawn = sum(int(e.sampled.sum()) for e in examples)
  for program, packing in programs:
    batch = examples if packing == NARROW else arms.shuffled(examples)
    found = program(cfg, packing)(weights, batch)
    print(f'{name} {program.__name__} {packing}: {found}')
    assert found == (drawn, 0, 0), (program.__name__, packing)
  COMPARED[name] = drawn, drawn * len(programs)
  print(f'{name}: {drawn} drawn tokens, {COMPARED[name][1]} comparisons')


ARMS = {
    'float32': (
        dict(SMALL),
        [
            (arms.check_forward, NARROW), (arms.check_forward, WIDE),
            (arms.check_update, NARROW),
        ],
    ),
    'bfloat16-wider-remat': (
        SMALL | WIDER | dict(precision='bfloat16', remat=True),
        [(arms.check_forward, NARROW), (arms.check_update, WIDE)],
    ),
}  # fmt: skip
# The other halves of the pairs.
MORE_ARMS = {
    'float32-wider-remat': (
        SMALL | WIDER | dict(remat=True),
        [(arms.check_forward, WIDE), (arms.check_update, NARROW)],
    ),
    'bfloat16': (
        SMALL | dict(precision='bfloat16'),
        [(arms.check_forward, WIDE), (arms.check_update, NARROW)],
    ),
    'fp8-mixed-layers-remat': (
        SMALL
        | WIDER
        | dict(precision='fp8', pattern='wbf', layers=4, dense_layers=1)
        | dict(dense_width=128, shared_width=16, remat=True),
        [(arms.check_forward, WIDE), (arms.check_update, NARROW)],
    ),
    'float32-mixed-layers': (
        SMALL
        | dict(pattern='wbf', layers=4, dense_layers=1, dense_width=48)
        | dict(shared_width=16, gating='sigmoid', tied=True),
        [(arms.check_forward, NARROW), (arms.check_update, WIDE)],
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
  compare(
      f'sinks-{precision}-{impl}', cfg, scripts, [(arms.check_update, NARROW)]
  )


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
  compare(f'fp8-{impl}', cfg, scripts, [(arms.check_update, NARROW)])


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
      [(arms.check_forward, WIDE), (arms.check_update, NARROW)],
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
  weights, examples = arms.generate(cfg, scripts, steps=((64, 16),))
  compared, unequal, _ = arms.check_forward(cfg, NARROW)(weights, examples)
  print(f'control: {unequal} of {compared} differ')
  assert unequal > compared // 20


def test_one_wrong_weight_is_seen():
  """One bit of one weight of the last norm: no route, but some log-probs."""
  cfg = samples.config(**SMALL)
  weights, examples = arms.generate(cfg, samples.traffic(cfg, 40))
  norm = np.array(weights['final_norm'])
  norm[3:4].view(np.int32)[0] ^= 1
  wrong = weights | {'final_norm': jax.numpy.asarray(norm)}
  compared, unequal, flips = arms.check_forward(cfg, NARROW)(wrong, examples)
  assert 10 < unequal < compared and flips == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    'precision',
    [
        'bfloat16',
        pytest.param('float32', marks=pytest.mark.long),
        pytest.param('fp8', marks=pytest.mark.long),
    ],
)
def test_no_bit_differs_in_the_default_shape(precision):
  """Eight layers of width 128; the million is in `test_matrix`."""
  cfg = config_lib.PolicyConfig(precision=precision)
  scripts = samples.traffic(cfg, 240)
  assert sum(sum(s.draws) for s in scripts) >= 15_000
  compare(
      f'default-{precision}',
      cfg,
      scripts,
      [(arms.check_forward, (8, 256)), (arms.check_update, (16, 256))],
      max_sequences=32,
      pool_pages=400,
      steps=((64, 40), (192, 64)),
  )
