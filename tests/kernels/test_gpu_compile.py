"""Every GPU kernel compiles for Hopper; next to nothing spills, nothing fuses.

Needs the compiler, see `kernels_pallas.gpu_compiler`, and no GPU:

  pytest -m gpu_compile tests/kernels
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import gpu_compiler
from kernels_pallas import numerics as nx
from kernels_pallas.grouped_matmul import ops as grouped
from kernels_pallas.matmul import ops as dense
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.paged_attention import ops as attention

pytestmark = pytest.mark.gpu_compile
CHIP = 'h100'
NUM = nx.Numerics('bfloat16')


@functools.cache
def missing():
  try:
    struct = jax.ShapeDtypeStruct((8,), jnp.float32)
    gpu_compiler.compile_for(lambda x: x + 1, [struct], CHIP)
  except RuntimeError as error:
    return str(error)
  return ''


@pytest.fixture(autouse=True)
def compiler():
  if missing():
    pytest.skip(missing())


def struct(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def check(run, args, kernels, fused=0, spill_bytes=0):
  """Compiles `run`.

  Asserts how many kernels there are, how much they spill at most, and how many
  fused multiply-adds there may be: `a * b + c` of ours must not become one.
  """
  compiled, found = gpu_compiler.compile_and_count(run, args, CHIP)
  for name, resources in found.items():
    print(f'{name}: {resources}')
    assert resources.spill_bytes <= spill_bytes
    assert resources.registers <= 255
    assert resources.fused <= fused
  assert compiled.as_text().count('custom_call_target="mosaic_gpu') == kernels


@pytest.mark.parametrize(
    ('t', 'd', 'f'),
    [
        (64, 1024, 3072),
        (2048, 1024, 3072),
        (2112, 3072, 1024),  # a short last row tile
        (64, 1024, 64),  # a router
        (256, 1000, 1000),  # padded
    ],
)
def test_matmul(t, d, f):
  run = lambda x, w: dense.matmul(x, w, numerics=NUM, impl='pallas')
  check(run, [struct(t, d), struct(d, f)], kernels=1)


@pytest.mark.parametrize(
    ('slots', 'd', 'f', 'e'),
    [
        (4096, 1024, 768, 64),
        (4096, 1024, 1536, 64),  # gate and up in one
        (512, 1024, 768, 64),  # a step of the sampler
    ],
)
def test_grouped_matmul(slots, d, f, e):
  def run(x_RD, w_EDF, experts_Tk):
    plan = grouped.plan(experts_Tk, e)

    def rounded(x, w):
      y = grouped.grouped_matmul(x, w, plan, numerics=NUM, impl='pallas')
      return NUM.cast(y)

    y, pull = jax.vjp(rounded, x_RD, w_EDF)
    return y, pull(y)

  with nx.target('gpu'):
    tile = grouped.group_tile(slots, e)
  rows = ((slots - 1) // tile + e) * tile
  experts = struct(slots // 8, 8, dtype=jnp.int32)
  check(run, [struct(rows, d), struct(e, d, f), experts], kernels=3)


MODES = {
    'full': {},
    'window 128': dict(window=128),
    'window 512': dict(window=512),
    'block': dict(topk=16),
}
TOKENS, HEADS, KV_HEADS = 2048, 16, 4


def attend(q, kv, layout, selected, window, topk):
  return attention.paged_attention(
      q,
      kv,
      layout,
      numerics=NUM,
      window=window,
      selected_TKj=selected if topk else None,
      impl='pallas',
  )


def learner(page, width, window=None, topk=0):
  """Value and gradients over two packed rows."""

  def run(q, kv, positions, selected):
    layout = layouts.row_layout(positions, page)
    fun = lambda q, kv: attend(q, kv, layout, selected, window, topk)
    value, pull = jax.vjp(fun, q, kv)
    return value, *pull(value)

  return run, [
      struct(TOKENS, HEADS, width),
      struct(TOKENS // page, page, KV_HEADS, 2 * width),
      struct(2, TOKENS // 2, dtype=jnp.int32),
      struct(TOKENS, KV_HEADS, topk, dtype=jnp.int32),
  ]


def engine(page, width, window=None, topk=0, tokens=256, sequences=64):
  """A step that mixes decode and prefill chunks; 32k tokens of context."""
  pages, tiles = 32768 // page, sequences + tokens // layouts.QUERY_TILE

  def run(q, kv, positions, rows, table, lanes, place, selected):
    layout = layouts.Layout(positions, rows, table, lanes, place)
    return attend(q, kv, layout, selected, window, topk)

  whole = functools.partial(struct, dtype=jnp.int32)
  return run, [
      struct(tokens, HEADS, width),
      struct(4096, page, KV_HEADS, 2 * width),
      whole(tokens),
      whole(tokens),
      whole(sequences, pages),
      whole(tiles, layouts.QUERY_TILE),
      whole(tokens),
      whole(tokens, KV_HEADS, topk),
  ]


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('width', [64, 128])
@pytest.mark.parametrize('page', [64, 128])
@pytest.mark.parametrize('form', [learner, engine])
def test_paged_attention(form, page, width, mode):
  # The logarithm of two sums in each thread is made of 24. Two warpgroups that
  # share the largest pages leave no register for the masks of a window.
  spill_bytes = 64 if 'window' in mode and page == width == 128 else 0
  run, args = form(page, width, **MODES[mode])
  kernels = 3 if form is learner else 1  # forward, dQ, dK with dV
  check(run, args, kernels, fused=24, spill_bytes=spill_bytes)


def test_xla_compiles_for_every_chip():
  run = lambda x, w: dense.matmul(x, w, numerics=NUM)
  for chip in gpu_compiler.CHIPS:
    args = [struct(128, 256), struct(256, 64)]
    assert 'mosaic' not in gpu_compiler.compile_for(run, args, chip).as_text()


def test_an_unknown_chip_is_named():
  with pytest.raises(ValueError, match="chip='v5e': allowed are .*'h100'"):
    gpu_compiler.compile_for(lambda x: x, [struct(8)], 'v5e')
