"""The sequences in pages that the kernels' tests share."""

import numpy as np

from agentic_rl.diagnostics import streams
from tests.kernels import samples

PAGE, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 8
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5)

pool, stream, packed = streams.pool, streams.stream, streams.packed
whole, pieces, by_place = streams.whole, streams.pieces, streams.by_place


def world(dtype='float32', lengths=LENGTHS, seed=0):
  def make(offset, n, heads, width):
    shape = (n, heads, width)
    return np.array(samples.normal(seed + offset, shape, dtype))

  return streams.World(
      PAGE,
      lengths,
      [make(2 * i, n, HEADS, WIDTH) for i, n in enumerate(lengths)],
      [make(2 * i + 1, n, KV_HEADS, 2 * WIDTH) for i, n in enumerate(lengths)],
  )
