"""Random traffic for the engine: sequences that join, read, draw and leave.

It mixes what could disturb a row: prompts that are read in chunks beside others
that decode, shared prefixes, turns with answers in between, more sequences than
slots. What was drawn becomes the learner's examples.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Callable, Mapping, Sequence

import numpy as np

from agentic_rl.learner import pack as pack_lib
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib


@dataclasses.dataclass(frozen=True)
class Script:
  """What one sequence reads and how much it draws.

  Attributes:
    rollout_id: names the random stream.
    prompt: ids to read first.
    draws: tokens drawn in each turn.
    observations: ids read after each turn but the last.
    wait: steps between a turn and its observation.
    forced: what the first draws must be, in order; the rest is drawn.
  """

  rollout_id: int
  prompt: tuple[int, ...]
  draws: tuple[int, ...]
  observations: tuple[tuple[int, ...], ...] = ()
  wait: int = 0
  forced: tuple[int, ...] = ()

  @property
  def length(self) -> int:
    """Tokens when it is done."""
    parts = (self.prompt, *self.observations)
    return sum(map(len, parts)) + sum(self.draws)


@dataclasses.dataclass
class Played:
  """What came of a script, per token.

  Attributes:
    tokens: int32 [T].
    sampled: bool [T], whether it was drawn.
    logp: float32 [T], recorded log-prob; 0 where nothing was drawn.
    routes: int16 [T, L_moe, topk], -1 for tokens that were never read; with
      weights if the engine records them.
    likeliest: int32 [T, k], what the engine found likeliest where it drew; k is
      0 unless it reports them.
    support: int32 [T, k], what each token was drawn among, or None.
  """

  tokens: np.ndarray
  sampled: np.ndarray
  logp: np.ndarray
  routes: np.ndarray
  likeliest: np.ndarray
  support: np.ndarray | None = None


@dataclasses.dataclass
class _Live:
  """A script that is being played."""

  script: Script
  drawn_at: dict[int, engine_lib.Drawn] = dataclasses.field(
      default_factory=dict
  )
  turn: int = 0
  drawn: int = 0
  due: int = -1


def play(
    engine: engine_lib.Engine | engines_lib.Engines,
    scripts: Sequence[Script],
    progress: Callable[[int], None] = lambda drawn: None,
) -> dict[int, Played]:
  """Plays scripts, as many at once as fit; returns {rollout_id: Played}.

  Args:
    engine: without open sequences.
    scripts: with distinct rollout ids.
    progress: told after each step how many tokens were drawn.
  """
  waiting, now, drawn = collections.deque(scripts), 0, 0
  live: dict[int, _Live] = {}
  out: dict[int, Played] = {}
  while waiting or live:
    while waiting and engine.can_insert():
      script = waiting.popleft()
      slot = engine.insert(script.rollout_id, script.prompt)
      engine.force(slot, script.forced)
      live[slot] = _Live(script)
    items = engine.generate()
    drawn += len(items)
    progress(drawn)
    for item in items:
      seq = live[item.slot]
      seq.drawn_at[engine.length(item.slot) - 1] = item
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


def _finish(engine, slot: int, seq: _Live) -> Played:
  tokens, routes = engine.release(slot)
  places, drawn = list(seq.drawn_at), list(seq.drawn_at.values())
  sampled, logp = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
  likeliest = np.zeros((len(tokens), len(drawn[0].likeliest)), np.int32)
  sampled[places] = True
  logp[places] = [d.logp for d in drawn]
  likeliest[places] = [d.likeliest for d in drawn]
  assert sampled.sum() == sum(seq.script.draws)
  # All but the last were read: a route that is not known is never compared.
  experts = routes['expert'] if routes.dtype.names else routes
  assert (experts[:-1] >= 0).all()
  support = {p: d.support for p, d in seq.drawn_at.items()}
  return Played(
      np.asarray(tokens, np.int32),
      sampled,
      logp,
      routes,
      likeliest,
      engine_lib.supports(support, len(tokens)),
  )


def draw_scripts(
    cfg: PolicyConfig, count: int, seed: int = 0, first_id: int = 0
) -> list[Script]:
  """Returns scripts of many kinds: lone and shared prompts, 1-4 turns.

  Args:
    cfg: for the vocabulary, the context and the page.
    count: how many.
    seed: of all choices.
    first_id: rollout id of the first; the others follow.
  """
  rng = np.random.default_rng(seed)

  def draw(n) -> tuple[int, ...]:
    return tuple(int(t) for t in rng.integers(0, cfg.vocab, n))

  longest = cfg.max_context
  shared = [draw(rng.integers(1, longest * 2 // 3)) for _ in range(3)]
  out = []
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
    out.append(
        Script(
            first_id + number,
            prompt,
            tuple(draws),
            tuple(observations),
            int(rng.integers(3)),
        )
    )
    assert out[-1].length <= longest
  return out


def examples(
    scripts: Sequence[Script], played: Mapping[int, Played]
) -> list[pack_lib.Example]:
  """Returns the learner's examples in the order of the scripts.

  Drawn tokens have a loss of weight 1 and a random advantage.
  """
  rng = np.random.default_rng(0)
  out = []
  for script in scripts:
    item = played[script.rollout_id]
    advantages = rng.normal(size=len(item.tokens)).astype(np.float32)
    out.append(
        pack_lib.Example(
            tokens=item.tokens,
            weights=item.sampled.astype(np.float32),
            advantages=advantages * item.sampled,
            logp_behavior=item.logp,
            sampled=item.sampled,
            routes=item.routes,
            support=item.support,
        )
    )
  return out
