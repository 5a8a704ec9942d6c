"""Several engines side by side behind the verbs of one, or a mesh of them.

One step is a program of many small operations and does not fill two cores; two
engines of half the size do. A rollout lives in one engine, and since what it
draws does not depend on its company, the number of engines changes no bit. On a
mesh every device has an engine's sequences and pages, and all step together.
"""

from __future__ import annotations

import dataclasses
from concurrent import futures
from typing import Any, Sequence

import jax
import numpy as np

from agentic_rl.parallel import mesh
from agentic_rl.policy import forward as forward_lib
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
    likeliest: see `Engine`.
    route_weights: see `Engine`.

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
      likeliest: int = 0,
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
            likeliest=likeliest,
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
  def weights(self) -> list[Any]:
    """The weights that each engine holds."""
    return [engine.weights for engine in self._engines]

  @property
  def weights_hashes(self) -> list[str]:
    """Hash of the weights that each engine holds."""
    return [engine.weights_hash for engine in self._engines]

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

  def force(self, slot: int, tokens: Sequence[int]) -> None:
    """See `Engine.force`."""
    index, own = divmod(slot, self._size)
    self._engines[index].force(own, tokens)

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
        self._numbered(index, d)
        for index, drawn in enumerate(list(steps))
        for d in drawn
    ]

  def _numbered(self, index: int, drawn: engine_lib.Drawn) -> engine_lib.Drawn:
    return dataclasses.replace(drawn, slot=index * self._size + drawn.slot)


class MeshEngines(Engines):
  """An engine on every device of a mesh; a step of all is one program.

  Args:
    cfg: shape of the policy.
    seed: of every draw.
    parallel: the mesh.
    max_sequences: on all devices together, a multiple of their number.
    pool_pages: KV pages on all devices together; 0 for enough.
    sampling: how tokens are drawn.
    likeliest: see `Engine`.
    route_weights: see `Engine`.

  Raises:
    ValueError: if the sizes do not fit.
  """

  def __init__(
      self,
      cfg: PolicyConfig,
      seed: int,
      *,
      parallel: mesh.Parallel,
      max_sequences: int,
      pool_pages: int = 0,
      sampling: engine_lib.Sampling,
      likeliest: int = 0,
      route_weights: bool = False,
  ):
    if max_sequences % parallel.size():
      raise ValueError(
          f'max_sequences={max_sequences}: must be a multiple of the'
          f" mesh's {parallel.size()} devices"
      )
    super().__init__(
        cfg,
        seed,
        engines=parallel.size(),
        max_sequences=max_sequences,
        pool_pages=pool_pages,
        sampling=sampling,
        likeliest=likeliest,
        route_weights=route_weights,
    )
    self._seed = np.uint32(seed)
    self._step = engine_lib.step_program(
        cfg, sampling, likeliest, route_weights, parallel
    )
    pages = self._engines[0].pages.num_pages
    one = jax.eval_shape(lambda: forward_lib.init_pool(cfg, pages))
    shapes = [(parallel.size() * a.shape[0], *a.shape[1:]) for a in one]
    zeros = jax.jit(
        lambda: forward_lib.Pool(
            *(jax.numpy.zeros(s, a.dtype) for s, a in zip(shapes, one))
        ),
        out_shardings=parallel.by_device(),
    )
    self._pool = zeros()

  def generate(self) -> list[engine_lib.Drawn]:
    """Runs a step on every device; see `Engine.generate`."""
    plans = [engine.schedule() for engine in self._engines]
    if not any(chunks for chunks, _ in plans):
      return []
    step = max(size for chunks, size in plans if chunks)
    staged = [
        engine.stage(chunks, step)
        for engine, (chunks, _) in zip(self._engines, plans)
    ]
    batch = jax.tree.map(lambda *a: np.stack(a), *(b for b, _ in staged))
    self._pool, found = self._step(
        self._engines[0].weights,
        self._pool,
        batch,
        self._seed,
        np.float32(not self.greedy),
    )
    found = jax.device_get(found)
    out = []
    for index, engine in enumerate(self._engines):
      own = jax.tree.map(lambda a, i=index: a[i], found)
      drawn = engine.book(plans[index][0], staged[index][1], own)
      out += [self._numbered(index, d) for d in drawn]
    return out
