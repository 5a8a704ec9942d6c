"""Block selection compiles for every chip."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.block_selection import ops
from kernels_pallas.paged_attention import layout as layouts

NUM = nx.Numerics('bfloat16')
TOPK = 16


def array(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def select(q, means, layout, page):
  return ops.select_pages(
      q, means, layout, page_size=page, topk=TOPK, numerics=NUM, impl='pallas'
  )


every_chip = pytest.mark.parametrize('chip', list(tpu_compiler.CHIPS))


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize(
    ('pages', 'page', 'heads', 'width'),
    [(32, 64, 4, 64), (32, 64, 4, 128), (16, 128, 4, 128), (9, 128, 8, 256)],
)
def test_means(chip, pages, page, heads, width):
  fun = lambda kv: ops.page_means(kv, numerics=NUM, impl='pallas')
  kv = array(pages, page, heads, 2 * width)
  text = tpu_compiler.compile_for(fun, [kv], chip).as_text()
  assert text.count('tpu_custom_call') == 1


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize(
    ('rows', 'length', 'page', 'heads', 'width'),
    [
        (1, 2048, 64, 4, 64),
        (2, 2048, 128, 4, 128),
        (1, 2048, 64, 16, 128),
        (1, 192, 64, 4, 128),  # 96 tokens a step
        (1, 2048, 128, 2, 256),
        (1, 1 << 20, 64, 4, 128),  # a million tokens
    ],
)
def test_rows(chip, rows, length, page, heads, width):
  def run(q, means, positions):
    return select(q, means, layouts.row_layout(positions, page), page)

  args = [
      array(rows * length, 16, width),
      array(rows * length // page, heads, width, dtype=jnp.float32),
      array(rows, length, dtype=jnp.int32),
  ]
  compiled = tpu_compiler.compile_for(run, args, chip)
  assert 'tpu_custom_call' in compiled.as_text()
  if length > 1 << 19:  # one float32 for each token and page is 64 GiB
    assert compiled.memory_analysis().temp_size_in_bytes < 12 << 30


@pytest.mark.tpu_compile
@every_chip
@pytest.mark.parametrize(
    ('tokens', 'pages', 'page', 'heads', 'width'),
    [
        (64, 256, 64, 4, 128),
        (64, 256, 64, 16, 128),
        (64, 256, 64, 1, 128),
        (2048, 16, 128, 4, 64),
        (64, 256, 128, 2, 256),
    ],
)
def test_engine(chip, tokens, pages, page, heads, width):
  def run(q, means, positions, sequences, table, tiles, place):
    layout = layouts.Layout(positions, sequences, table, tiles, place)
    return select(q, means, layout, page)

  index = lambda *shape: array(*shape, dtype=jnp.int32)
  args = [
      array(tokens, 16, width),
      array(1025, heads, width, dtype=jnp.float32),
      index(tokens),
      index(tokens),
      index(64, pages),
      index(tokens // 4, layouts.QUERY_TILE),
      index(tokens),
  ]
  text = tpu_compiler.compile_for(run, args, chip).as_text()
  assert 'tpu_custom_call' in text
