"""Small policies, weights without the compiler, and traffic for the engine."""

import jax
import jax.numpy as jnp
import numpy as np

from agentic_rl.diagnostics import traffic as traffic_lib
from agentic_rl.policy import config as config_lib
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from agentic_rl.rollout import engine as engine_lib
from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import layout as layouts

STEPS = ((64, 16), (192, 40))

Script = traffic_lib.Script
play = traffic_lib.play
traffic = traffic_lib.draw_scripts


def config(**changes):
  fields = dict(
      vocab=64,
      width=32,
      layers=4,
      pattern='wb',
      heads=2,
      kv_heads=1,
      head_width=16,
      experts=4,
      expert_width=16,
      window=12,
      page=8,
      topk_pages=2,
      max_context=64,
  )
  return config_lib.PolicyConfig(**(fields | changes))


def weights(cfg, seed=0):
  """Weights of `model.init`'s shapes: normal matrices, norms near one."""
  rng = np.random.default_rng(seed)

  def leaf(path, shape):
    name = jax.tree_util.keystr(path)
    noise = rng.normal(size=shape.shape)
    if 'norm' in name:
      value = 1 + 0.1 * noise
    elif model.is_balance(path):
      return jnp.asarray(0.01 * noise, jnp.float32)
    elif 'embedding' in name or 'sink' in name:
      value = noise
    else:
      value = noise * shape.shape[-2] ** -0.5
    return cfg.numerics.cast(jnp.asarray(value, jnp.float32))

  shapes = jax.eval_shape(lambda: model.init(cfg, 0))
  return jax.tree.map_with_path(leaf, shapes)


def copy(tree):
  """Own buffers, for programs that take theirs over."""
  return jax.tree.map(lambda a: a.copy(), tree)


def assert_same(a, b):
  """Fails unless two results of `play` are equal to the bit."""
  assert a.keys() == b.keys()
  for name in a:
    one, two = a[name], b[name]
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.sampled, two.sampled)
    bits = [x.logp.view(np.int32) for x in (one, two)]
    np.testing.assert_array_equal(*bits)
    np.testing.assert_array_equal(one.routes, two.routes)


def make_engine(cfg, seed=3, *, version=0, weights_=None, **options):
  """An engine of 8 slots over 44 pages, with its weights."""
  options = dict(max_sequences=8, pool_pages=44, steps=STEPS) | options
  engine = engine_lib.Engine(cfg, seed, **options)
  engine.load_params(weights(cfg) if weights_ is None else weights_, version)
  return engine


def logits(cfg, weights_, tokens, temperature):
  """float32 [T, V] of one sequence by the plain forward, not the engine."""
  size = -(-len(tokens) // nx.ROW_TILE) * nx.ROW_TILE
  padded = np.zeros(size, np.int32)
  padded[: len(tokens)] = tokens

  def run(w, t):
    layout = layouts.row_layout(jnp.arange(size)[None], cfg.page)
    x = forward_lib.forward(w, t, layout, cfg)[0]
    return x @ forward_lib.head(w, cfg) / temperature

  return np.asarray(nx.jit(run)(weights_, padded))[: len(tokens)]
