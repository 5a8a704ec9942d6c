"""What a token costs as the context grows: pages read, memory of a step.

The layers of `LAYERS` do the work of the two phases of the engine: a decode
step, one token of each of a few sequences, and a prefill chunk of one sequence,
both at the end of a context. Counted are

  * pages per token and KV head: the lengths of the page lists that the TPU
    kernel walks (`pallas_tpu.pages_read`), for one tile of queries, over its
    tokens. Queries and mean keys are random and independent, so tokens of a
    tile agree on no page: correlated ones read fewer.
  * temporaries: bytes of HBM that the program holds besides arguments and
    results, block selection included, from the real TPU compiler.

A window or a block-sparse layer must not read more pages at a longer context,
and no layer may hold a float32 number for each token and page in HBM, which is
checked at contexts above `PADDING` pages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler
from kernels_pallas.block_selection import ops as selection
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.paged_attention import ops as attention
from kernels_pallas.paged_attention import pallas_tpu
from kernels_pallas.paged_attention.form import Form

CONTEXTS = (4096, 32768, 262144, 1048576)
HEADS, KV_HEADS, WIDTH, PAGE = 16, 4, 128, 128
WINDOW, TOPK = 512, 16
SEQUENCES, CHUNK = 4, 2048  # of a decode step; tokens of a prefill chunk
LAYERS = ('window', 'block-sparse', 'full')
PHASES = ('decode', 'prefill')
# Block selection rounds the pages up to a multiple of it. Arrays of so many
# pages are not told from those with an axis of `WIDTH`.
PADDING = 128


@dataclasses.dataclass(frozen=True)
class Row:
  """The cost of a layer's attention in a phase.

  Attributes:
    op: phase and layer.
    chip: key of `tpu_compiler.CHIPS`.
    context: tokens of a sequence.
    pages_per_token: pages read per token and KV head.
    temp_bytes: temporaries of the compiled program in HBM.
  """

  op: str
  chip: str
  context: int
  pages_per_token: float
  temp_bytes: int


def measure(
    chip: str,
    contexts: Sequence[int] = CONTEXTS,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[list[Row], list[str]]:
  """Measures all phases and layers at each context.

  Args:
    chip: key of `tpu_compiler.CHIPS`.
    contexts: tokens of a sequence, multiples of `PAGE` from `CHUNK` on.
    note: told what is being done.

  Returns:
    The rows, and what does not hold.

  Raises:
    ValueError: on an unknown chip or a context that is not allowed.
  """
  if chip not in tpu_compiler.CHIPS:
    raise ValueError(f'chip={chip!r}: allowed are {sorted(tpu_compiler.CHIPS)}')
  for context in contexts:
    if context < CHUNK or context % PAGE:
      raise ValueError(
          f'context={context}: a multiple of {PAGE} from {CHUNK} on is allowed'
      )
  rows, faults = [], []
  for phase in PHASES:
    for layer in LAYERS:
      for context in contexts:
        op = f'{phase} {layer}'
        note(f'{op} at {context}')
        fun, args = program(phase, layer, context)
        compiled = tpu_compiler.compile_for(fun, args, chip)
        if context // PAGE > PADDING:
          tokens, text = args[0].shape[0], compiled.as_text()
          for shape in scores_in_hbm(text, tokens, context // PAGE):
            faults.append(f'{op} at {context}: {shape} is in HBM')
        pages = pages_per_token(phase, layer, context)
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        rows.append(Row(op, chip, context, pages, temp_bytes))
  return rows, faults + growth(rows)


def growth(rows: Sequence[Row]) -> list[str]:
  """Returns where windows or block-sparse layers read more than they may."""
  faults = []
  for row in rows:
    most = TOPK + 1.0
    if 'window' in row.op:
      most = min(r.pages_per_token for r in rows if r.op == row.op)
    if 'full' not in row.op and row.pages_per_token > most:
      faults.append(
          f'{row.op} at {row.context}: {row.pages_per_token:.2f} pages per'
          f' token, at most {most:.2f} are allowed'
      )
  return faults


def pages_per_token(phase: str, layer: str, context: int) -> float:
  """Returns pages per token and KV head that a tile of queries reads.

  Args:
    phase: of `PHASES`; the tile of a decode step has one token.
    layer: of `LAYERS`.
    context: tokens of the sequence, the tile's last one included.
  """
  tile = layouts.QUERY_TILE
  count = 1 if phase == 'decode' else tile
  tokens = jnp.arange(context - count, context)
  places = tokens % tile
  layout = layouts.Layout(
      tokens,
      jnp.zeros(count, jnp.int32),
      jnp.arange(context // PAGE)[None],
      jnp.full((1, tile), count).at[0, places].set(jnp.arange(count)),
      places,
  )
  selected = None
  if layer == 'block-sparse':
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    selected = selection.select_pages(
        draw(count, HEADS, WIDTH),
        draw(context // PAGE, KV_HEADS, WIDTH),
        layout,
        page_size=PAGE,
        topk=TOPK,
        numerics=nx.Numerics(),
    )
  form = Form(WINDOW if layer == 'window' else None)
  pages = pallas_tpu.pages_read(layout, PAGE, form, selected)
  return float(pages.mean()) / count


def program(phase: str, layer: str, context: int, impl: str = 'pallas'):
  """Returns attention of a step with its block selection, and its arguments.

  Args:
    phase: of `PHASES`.
    layer: of `LAYERS`.
    context: tokens of each sequence.
    impl: of the ops.
  """
  sequences = SEQUENCES if phase == 'decode' else 1
  tokens = SEQUENCES if phase == 'decode' else CHUNK
  tiles = SEQUENCES if phase == 'decode' else CHUNK // layouts.QUERY_TILE
  pages = context // PAGE
  numerics = nx.Numerics('bfloat16')

  def run(q, kv, means, layout):
    selected = None
    if layer == 'block-sparse':
      selected = selection.select_pages(
          q,
          means,
          layout,
          page_size=PAGE,
          topk=TOPK,
          numerics=numerics,
          impl=impl,
      )
    return attention.paged_attention(
        q,
        kv.reshape(*kv.shape[:2], KV_HEADS, -1),
        layout,
        numerics=numerics,
        window=WINDOW if layer == 'window' else None,
        selected_TKj=selected,
        impl=impl,
    )

  struct = jax.ShapeDtypeStruct
  index = functools.partial(struct, dtype=jnp.int32)
  pool = sequences * pages
  return run, [
      struct((tokens, HEADS, WIDTH), jnp.bfloat16),
      struct((pool, PAGE, KV_HEADS * 2 * WIDTH), jnp.bfloat16),
      struct((pool, KV_HEADS, WIDTH), jnp.float32),
      layouts.Layout(
          index((tokens,)),
          index((tokens,)),
          index((sequences, pages)),
          index((tiles, layouts.QUERY_TILE)),
          index((tokens,)),
      ),
  ]


_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) \(.*\{$')
_FUSED = re.compile(r'fusion\(.*calls=%?([\w.-]+)')
_RESULT = re.compile(r'= \(?(.*?)\)? [\w-]+\(')
_ARRAY = re.compile(r'f32\[([\d,]+)\](\{[^}]*\})?')


def scores_in_hbm(hlo: str, tokens: int, pages: int) -> list[str]:
  """Returns float32 arrays of a number for each token and page, or more.

  Args:
    hlo: text of a compiled program.
    tokens: of the step.
    pages: of a sequence, more than `PADDING`.

  Returns:
    The shapes, of what is an instruction of its own, no part of a fusion, no
    argument and not in VMEM.
  """
  found = []
  widths = (pages, -(-pages // PADDING) * PADDING)
  for line in _instructions(hlo):
    result = _RESULT.search(line)
    if not result or ' parameter(' in line:
      continue
    for dims, place in _ARRAY.findall(result[1]):
      sizes = [int(n) for n in dims.split(',')]
      large = math.prod(sizes) >= tokens * pages
      if large and set(sizes) & set(widths) and 'S(1)' not in place:
        found.append(f'f32[{dims}]')
  return found


def _instructions(hlo: str) -> Iterator[str]:
  """Yields the lines of all computations that no fusion calls."""
  fused, name = set(_FUSED.findall(hlo)), ''
  for line in hlo.splitlines():
    head = _COMPUTATION.match(line)
    name = head[1] if head else name
    if not head and name not in fused:
      yield line


def table(rows: Sequence[Row], faults: Sequence[str]) -> str:
  """Returns what `measure` found as text."""
  lines = [
      f'Attention of {HEADS} query heads, {KV_HEADS} KV heads of {WIDTH}, pages'
      f' of {PAGE} tokens; window {WINDOW}, {TOPK} selected pages; decode of'
      f' {SEQUENCES} sequences, prefill of {CHUNK} tokens of one.',
      f'{"op":22s} {"chip":5s} {"context":>8s} {"pages/token":>11s}'
      f' {"temporaries":>12s}',
  ]
  for r in rows:
    lines.append(
        f'{r.op:22s} {r.chip:5s} {r.context:8d} {r.pages_per_token:11.3f}'
        f' {r.temp_bytes / 2**20:8.2f} MiB'
    )
  lines += faults or [
      'no float32 number for each token and page is in HBM (contexts above'
      f' {PADDING * PAGE})'
  ]
  return '\n'.join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """Returns the rows as plain values."""
  return [dataclasses.asdict(r) for r in rows]
