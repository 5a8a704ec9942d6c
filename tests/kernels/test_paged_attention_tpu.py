"""The TPU compiler takes paged attention at the shapes that policies use."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.paged_attention import ops

pytestmark = pytest.mark.tpu_compile
BF16 = nx.Numerics('bfloat16')
MODES = {
    'full': {},
    'window 128': dict(window=128),
    'window 512': dict(window=512),
    'block': dict(topk=16),
    'full sink cap': dict(sinks=True),
    'window 512 sink cap': dict(window=512, sinks=True),
    'window 512 sink page': dict(window=512, sinks=True, sink_page=True),
    'block all': dict(topk=16, sinks=True, sink_page=True),
}
TOKENS, HEADS, KV_HEADS = 2048, 16, 4
# All shapes for one chip, and one shape for the others and for more modes.
SHAPES = [
    *(('v5e', page, width) for page in (64, 128) for width in (64, 128, 256)),
    *((chip, 128, 128) for chip in sorted(tpu_compiler.CHIPS) if chip != 'v5e'),
]


CASES = [
    (*shape, mode)
    for shape in SHAPES
    for mode, options in MODES.items()
    if shape[1:] == (128, 128) or 'sinks' not in options
]
every_case = pytest.mark.parametrize(('chip', 'page', 'width', 'mode'), CASES)


def struct(shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def call(q, kv, sink, layout, selected, topk, window, sinks, sink_page):
  return ops.paged_attention(
      q,
      kv,
      layout,
      numerics=BF16,
      window=window,
      selected_TKj=selected if topk else None,
      sink_N=sink if sinks else None,
      soft_cap=50.0 if sinks else 0.0,
      sink_page=sink_page,
      impl='pallas',
  )


def learner(width, page, window=None, topk=0, sinks=False, sink_page=False):
  """Value and gradients over two packed rows."""

  def run(q, kv, sink, positions, selected):
    layout = layouts.row_layout(positions, page)
    fun = lambda q, kv, sink: call(
        q, kv, sink, layout, selected, topk, window, sinks, sink_page
    )
    value, pull = jax.vjp(fun, q, kv, sink)
    return value, *pull(value)

  return run, [
      struct((TOKENS, HEADS, width)),
      struct((TOKENS // page, page, KV_HEADS, 2 * width)),
      struct((HEADS,)),
      struct((2, TOKENS // 2), jnp.int32),
      struct((TOKENS, KV_HEADS, topk), jnp.int32),
  ]


def engine(width, page, window=None, topk=0, sinks=False, sink_page=False):
  """A step that mixes decode and prefill chunks; 32k tokens of context."""
  tokens, sequences = 256, 64
  pages, tiles = 32768 // page, sequences + tokens // layouts.QUERY_TILE

  def run(q, kv, sink, positions, rows, table, lanes, place, selected):
    layout = layouts.Layout(positions, rows, table, lanes, place)
    return call(q, kv, sink, layout, selected, topk, window, sinks, sink_page)

  return run, [
      struct((tokens, HEADS, width)),
      struct((4096, page, KV_HEADS, 2 * width)),
      struct((HEADS,)),
      struct((tokens,), jnp.int32),
      struct((tokens,), jnp.int32),
      struct((sequences, pages), jnp.int32),
      struct((tiles, layouts.QUERY_TILE), jnp.int32),
      struct((tokens,), jnp.int32),
      struct((tokens, KV_HEADS, topk), jnp.int32),
  ]


@every_case
def test_learner_compiles(chip, mode, page, width):
  run, args = learner(width, page, **MODES[mode])
  text = tpu_compiler.compile_for(run, args, chip).as_text()
  slides = 'window' in mode and 'page' not in mode
  name = 'slide' if slides else 'walk'
  assert f'paged_attention_{name}' in text
  assert 'paged_attention_backward' in text


@every_case
def test_engine_compiles(chip, mode, page, width):
  run, args = engine(width, page, **MODES[mode])
  text = tpu_compiler.compile_for(run, args, chip).as_text()
  assert 'paged_attention_walk' in text


def test_unsupported_shapes_are_named():
  compile_ = functools.partial(tpu_compiler.compile_for, chip='v5e')
  with pytest.raises(ValueError, match='head width 96: a multiple of 64'):
    compile_(*learner(96, 128))
  with pytest.raises(ValueError, match='page size 8: a multiple of 16'):
    compile_(*engine(128, 8))
