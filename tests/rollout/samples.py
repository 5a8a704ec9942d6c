"""Small policies, weights without the compiler, and traffic for the engine."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from agentic_rl.policy import config as config_lib
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import model
from agentic_rl.rollout import engine as engine_lib
from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import layout as layouts

STEPS = ((64, 16), (192, 40))


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
    else:
      value = noise if 'embedding' in name else noise * shape.shape[-2] ** -0.5
    return cfg.numerics.cast(jnp.asarray(value, jnp.float32))

  shapes = jax.eval_shape(lambda: model.init(cfg, 0))
  return jax.tree.map_with_path(leaf, shapes)


def copy(tree):
  """Own buffers, for programs that take theirs over."""
  return jax.tree.map(lambda a: a.copy(), tree)


@dataclasses.dataclass(frozen=True)
class Script:
  """What one sequence reads and how much it draws.

  Attributes:
    rollout_id: names the random stream.
    prompt: ids to read first.
    draws: tokens drawn in each turn.
    observations: ids read after each turn but the last.
    wait: steps between a turn and its observation.
  """

  rollout_id: int
  prompt: tuple[int, ...]
  draws: tuple[int, ...]
  observations: tuple[tuple[int, ...], ...] = ()
  wait: int = 0

  @property
  def length(self):
    parts = (self.prompt, *self.observations)
    return sum(map(len, parts)) + sum(self.draws)


@dataclasses.dataclass
class Played:
  """What came of a script; `logp` is 0 where nothing was drawn."""

  tokens: np.ndarray
  sampled: np.ndarray
  logp: np.ndarray
  routes: np.ndarray


@dataclasses.dataclass
class _Live:
  script: Script
  logp: dict[int, float] = dataclasses.field(default_factory=dict)
  turn: int = 0
  drawn: int = 0
  due: int = -1


def play(engine, scripts):
  """Plays scripts, as many at once as fit; returns {rollout_id: Played}."""
  waiting, live, out, now = collections.deque(scripts), {}, {}, 0
  while waiting or live:
    while waiting and engine.can_insert():
      script = waiting.popleft()
      slot = engine.insert(script.rollout_id, script.prompt)
      live[slot] = _Live(script)
    for item in engine.generate():
      seq = live[item.slot]
      seq.logp[engine.length(item.slot) - 1] = item.logp
      seq.drawn += 1
      if seq.drawn == seq.script.draws[seq.turn]:
        engine.pause(item.slot)
        seq.due = now + seq.script.wait
    for slot, seq in list(live.items()):
      if seq.due < 0 or seq.due > now:
        continue
      if seq.turn < len(seq.script.observations):
        engine.prefill(slot, seq.script.observations[seq.turn])
        seq.turn, seq.drawn, seq.due = seq.turn + 1, 0, -1
      else:
        out[seq.script.rollout_id] = _finish(engine, slot, seq)
        del live[slot]
    now += 1
  return out


def _finish(engine, slot, seq):
  tokens, routes = engine.release(slot)
  sampled, logp = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
  sampled[list(seq.logp)] = True
  logp[list(seq.logp)] = list(seq.logp.values())
  assert sampled.sum() == sum(seq.script.draws)
  return Played(np.asarray(tokens, np.int32), sampled, logp, routes)


def traffic(cfg, count, seed=0, first_id=0):
  """Scripts of many kinds: lone and shared prompts, one to four turns."""
  rng = np.random.default_rng(seed)
  draw = lambda n: tuple(int(t) for t in rng.integers(0, cfg.vocab, n))
  longest = cfg.max_context
  shared = [draw(rng.integers(1, longest * 2 // 3)) for _ in range(3)]
  scripts = []
  for number in range(count):
    kind = rng.integers(4)
    prompt = shared[kind] if kind < 3 else draw(rng.integers(1, longest // 2))
    left = longest - len(prompt)
    draws, observations = [], []
    for _ in range(rng.integers(1, 5)):
      drawn = int(rng.integers(1, max(2, left // 2)))
      read = int(rng.integers(1, 2 * cfg.page))
      if left <= drawn + read + 1:
        break
      draws.append(drawn)
      observations.append(draw(read))
      left -= drawn + read
    draws.append(int(rng.integers(1, left + 1)))
    scripts.append(
        Script(
            first_id + number,
            prompt,
            tuple(draws),
            tuple(observations),
            int(rng.integers(3)),
        )
    )
    assert scripts[-1].length <= longest
  return scripts


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
