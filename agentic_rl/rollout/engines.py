"""Several engines side by side behind the verbs of one.

One step is a program of many small operations and does not fill two cores; two
engines of half the size do. A rollout lives in one engine, and since what it
draws does not depend on its company, the number of engines changes no bit.
"""

from __future__ import annotations

import dataclasses
from concurrent import futures
from typing import Any, Sequence

from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import engine as engine_lib


class Engines:
  """Shares sequences among engines; slots are numbered through.

  Args:
    cfg: shape of the policy.
    seed: of every draw.
    engines: number of engines, each with its own KV pages.
    max_sequences: of all engines together, a multiple of their number.
    pool_pages: KV pages of all engines together; 0 for enough.
    sampling: how tokens are drawn.
    route_weights: record the weights of the experts, too.

  Raises:
    ValueError: if the sizes do not fit.
  """

  def __init__(
      self,
      cfg: PolicyConfig,
      seed: int,
      *,
      engines: int,
      max_sequences: int,
      pool_pages: int = 0,
      sampling: engine_lib.Sampling,
      route_weights: bool = False,
  ):
    if engines < 1 or max_sequences % engines:
      raise ValueError(
          f'engines={engines}: must divide max_sequences={max_sequences}'
      )
    self.cfg, self.max_sequences = cfg, max_sequences
    self._size = max_sequences // engines
    self._engines = [
        engine_lib.Engine(
            cfg,
            seed,
            max_sequences=self._size,
            pool_pages=pool_pages // engines,
            sampling=sampling,
            route_weights=route_weights,
        )
        for _ in range(engines)
    ]
    self._open = [0] * engines
    self._threads = futures.ThreadPoolExecutor(engines)

  def load_params(self, weights: Any, version: int) -> None:
    """Gives the weights of a version to every engine; nothing is copied."""
    for engine in self._engines:
      engine.load_params(weights, version)

  @property
  def version(self) -> int:
    """Version of the weights."""
    return self._engines[0].version

  @property
  def greedy(self) -> bool:
    """Draw the likeliest token instead."""
    return self._engines[0].greedy

  @greedy.setter
  def greedy(self, value: bool) -> None:
    for engine in self._engines:
      engine.greedy = value

  @property
  def counts(self) -> dict[str, int]:
    """Sums of the engines' counts."""
    parts = [engine.counts for engine in self._engines]
    return {name: sum(p[name] for p in parts) for name in parts[0]}

  @property
  def busy(self) -> bool:
    """True if a step would do something."""
    return any(engine.busy for engine in self._engines)

  @property
  def reading(self) -> bool:
    """True while some sequence has tokens to read before it can draw."""
    return any(engine.reading for engine in self._engines)

  def can_insert(self) -> bool:
    """True if some engine has room."""
    return any(engine.can_insert() for engine in self._engines)

  def insert(self, rollout_id: int, tokens: Sequence[int]) -> int:
    """Opens a sequence in the emptiest engine; see `Engine.insert`."""
    able = [i for i, e in enumerate(self._engines) if e.can_insert()]
    index = min(able, key=lambda i: self._open[i], default=0)
    slot = self._engines[index].insert(rollout_id, tokens)
    self._open[index] += 1
    return index * self._size + slot

  def prefill(self, slot: int, tokens: Sequence[int]) -> None:
    """See `Engine.prefill`."""
    index, own = divmod(slot, self._size)
    self._engines[index].prefill(own, tokens)

  def pause(self, slot: int) -> None:
    """See `Engine.pause`."""
    index, own = divmod(slot, self._size)
    self._engines[index].pause(own)

  def paused(self, slot: int) -> bool:
    """See `Engine.paused`."""
    index, own = divmod(slot, self._size)
    return self._engines[index].paused(own)

  def length(self, slot: int) -> int:
    """See `Engine.length`."""
    index, own = divmod(slot, self._size)
    return self._engines[index].length(own)

  def release(self, slot: int):
    """See `Engine.release`."""
    index, own = divmod(slot, self._size)
    self._open[index] -= 1
    return self._engines[index].release(own)

  def generate(self) -> list[engine_lib.Drawn]:
    """Runs a step of every engine at once; see `Engine.generate`."""
    steps = self._threads.map(lambda engine: engine.generate(), self._engines)
    return [
        dataclasses.replace(d, slot=index * self._size + d.slot)
        for index, drawn in enumerate(list(steps))
        for d in drawn
    ]
