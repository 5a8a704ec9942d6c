"""What exactness costs: the same code with and without it, in one run.

The control arm has free tiles, XLA's own reductions and default fusion
(`kernels_pallas.numerics.Numerics(exact=False)`). Both arms are measured in
turns in one process, so that other work on the machine hits both alike.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable

import jax
import numpy as np

from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.policy import model
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib


def measure(
    cfg: PolicyConfig,
    *,
    sequences: int,
    engines: int,
    rows: int,
    row_tokens: int,
    rounds: int = 9,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
  """Times decode steps and learner microbatches of both arms.

  Args:
    cfg: shape of the policy.
    sequences: sequences that decode at once.
    engines: engines that share them.
    rows: rows of a microbatch.
    row_tokens: tokens of a row.
    rounds: timed repetitions; medians are reported.
    note: told what is being done.

  Returns:
    Decode and learner tokens per second of both arms, and the ratios of the
    free arm's speed to the exact one's: `sampler_ratio`, `learner_ratio`.
  """
  arms = {}
  for name, exact in (('exact', True), ('free', False)):
    note(f'compiling the {name} arm')
    arm = dataclasses.replace(cfg, exact=exact)
    arms[name] = _decoder(arm, sequences, engines), _learner(
        arm, rows, row_tokens
    )
  seconds: dict[str, list[list[float]]] = {n: [[], []] for n in arms}
  for i in range(rounds):
    note(f'round {i + 1} of {rounds}')
    for name, parts in arms.items():
      for place, part in enumerate(parts):
        seconds[name][place].append(part())
  medians = {n: [float(np.median(x)) for x in s] for n, s in seconds.items()}
  tokens = rows * row_tokens
  return {
      'sampler_ratio': medians['exact'][0] / medians['free'][0],
      'learner_ratio': medians['exact'][1] / medians['free'][1],
      'decode_tokens_per_s': sequences / medians['exact'][0],
      'decode_tokens_per_s_free': sequences / medians['free'][0],
      'learner_tokens_per_s': tokens / medians['exact'][1],
      'learner_tokens_per_s_free': tokens / medians['free'][1],
      'sequences': sequences,
      'engines': engines,
      'microbatch_tokens': tokens,
      'rounds': rounds,
  }


def _decoder(
    cfg: PolicyConfig, sequences: int, engines: int
) -> Callable[[], float]:
  """Returns a function that times some decode steps of full batches."""
  steps, rng = 4, np.random.default_rng(0)
  engine = engines_lib.Engines(
      cfg,
      0,
      engines=engines,
      max_sequences=sequences,
      sampling=engine_lib.Sampling(),
  )
  engine.load_params(model.init(cfg, 0), 0)

  def fill():
    for i in range(sequences):
      engine.insert(
          i, rng.integers(0, cfg.vocab, cfg.max_context // 3).tolist()
      )
    while engine.reading:
      engine.generate()

  def run() -> float:
    if engine.length(0) + steps >= cfg.max_context:
      for slot in range(sequences):
        engine.release(slot)
      fill()
    began = time.perf_counter()
    for _ in range(steps):
      engine.generate()
    return (time.perf_counter() - began) / steps

  fill()
  run()
  return run


def _learner(cfg: PolicyConfig, rows: int, length: int) -> Callable[[], float]:
  """Returns a function that times one update on one full microbatch."""
  learner = update.Learner(
      cfg,
      update.LossConfig('ppo_clip'),
      optimizer_lib.make('adam', learning_rate=1e-4, steps=1),
      rows=rows,
      row_tokens=length,
  )
  rng, size = np.random.default_rng(0), length // 2
  examples = []
  for _ in range(2 * rows):
    drawn = rng.random(size) < 0.25
    examples.append(
        pack_lib.Example(
            tokens=rng.integers(0, cfg.vocab, size).astype(np.int32),
            weights=drawn.astype(np.float32),
            advantages=rng.normal(size=size).astype(np.float32),
            logp_behavior=np.full(size, -np.log(cfg.vocab), np.float32),
            sampled=drawn,
        )
    )
  batch = learner.pack(examples)
  weights = model.init(cfg, 0)
  carry = [weights, learner.init(weights)]

  def run() -> float:
    began = time.perf_counter()
    carry[0], carry[1], _ = learner.update(carry[0], carry[1], batch)
    jax.block_until_ready(carry)
    return time.perf_counter() - began

  run()
  return run
