"""Whole programs of a mesh of TPUs, compiled without one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl import numerics
from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.parallel import mesh
from agentic_rl.policy import config as config_lib
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from agentic_rl.rollout import engine as engine_lib
from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler

pytest.importorskip('libtpu')
pytestmark = pytest.mark.tpu_compile

POLICY = config_lib.PolicyConfig(
    vocab=2048, width=512, layers=4, heads=4, kv_heads=2, head_width=128,
    pattern='wb', window=128, page=64, topk_pages=2, experts=8,
    expert_width=256, max_context=1024, precision='bfloat16', remat=True,
)  # fmt: skip


def abstract(tree, shardings):
  return jax.tree.map(
      lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
      tree,
      shardings,
  )


def shapes_on(parallel):
  weights = jax.eval_shape(lambda: model.init(POLICY, 0))
  return abstract(weights, parallel.shardings(model.logical_axes(POLICY)))


@pytest.mark.parametrize(
    'text',
    [
        'expert=2,context=2',
        pytest.param('fsdp=2,expert=2', marks=pytest.mark.slow),
        pytest.param('fsdp=2,context=2', marks=pytest.mark.slow),
    ],
)
def test_a_learner_of_a_mesh_compiles(text):
  with nx.target('tpu'):
    parallel = mesh.make(text, devices=tpu_compiler.devices('v5e'))
    learner = update.Learner(
        POLICY,
        update.LossConfig(),
        optimizer_lib.make('adam', learning_rate=1e-3, steps=9),
        rows=4,
        row_tokens=1024,
        parallel=parallel,
    )
    tokens = np.arange(1000, dtype=np.int32)
    example = pack_lib.from_text(tokens, np.ones(1000, np.float32))
    inputs = inputs_lib.flatten(learner.pack([example] * 4), parallel)
    weights = shapes_on(parallel)
    sums = jax.eval_shape(lambda w: update.Sums.zeros(POLICY, w), weights)
    program = learner._accumulate.lower(
        weights, None, sums, inputs, np.float32(1)
    ).compile()
  text = program.as_text()
  moved = set(re.findall(r'(all-gather|all-to-all|collective-permute)', text))
  wanted = {
      'fsdp': 'all-gather', 'expert': 'all-to-all',
      'context': 'collective-permute',
  }  # fmt: skip
  for axis, op in wanted.items():
    assert parallel.size(axis) == 1 or op in moved, (axis, moved)
  print(program.memory_analysis())


def test_a_sampler_of_a_mesh_compiles_and_sums_nothing():
  with nx.target('tpu'):
    parallel = mesh.make('fsdp=2,expert=2', devices=tpu_compiler.devices('v5e'))
    engine = engine_lib.Engine(POLICY, 0, max_sequences=32)
    inputs, _ = engine.stage([], 0)
    stacked = jax.tree.map(lambda a: np.stack([a] * 4), inputs)
    pool = jax.eval_shape(lambda: forward_lib.init_pool(POLICY, 512))
    own = parallel.by_device()
    pool = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            (4 * a.shape[0], *a.shape[1:]), a.dtype, sharding=own
        ),
        pool,
    )
    step = engine_lib.step_program(
        POLICY, engine_lib.Sampling(), 0, False, parallel
    )
    lowered = step.lower(
        shapes_on(parallel), pool, stacked, np.uint32(0), jnp.float32(1)
    )
    assert numerics.order_sensitive_reductions(lowered.as_text()) == []
    text = lowered.compile().as_text()
  assert 'all-gather' in text and 'all-to-all' in text
  assert 'all-reduce' not in text and 'reduce-scatter' not in text
