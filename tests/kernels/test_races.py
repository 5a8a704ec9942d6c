"""No race in the TPU kernels, by an interpreter that follows every copy.

`pltpu.InterpretParams` models memories, copies and semaphores, fills scratch
with NaN, and says what it finds: two accesses that nothing puts in order. JAX
0.10 prints it, later ones raise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import numerics as nx
from kernels_pallas.grouped_matmul import ops as grouped
from kernels_pallas.paged_attention import layout as layouts
from kernels_pallas.paged_attention import ops as attention
from tests.kernels import samples

NUM = samples.EXACT['float32']
PAGE, WIDTH = 8, 8


def watched(fun, args, capsys):
  """Returns fun(*args) and what the race detector said."""
  pltpu.reset_tpu_interpret_mode_state()
  capsys.readouterr()
  # On wait: a copy moves its data as late as it may.
  params = pltpu.InterpretParams(
      detect_races=True, dma_execution_mode='on_wait'
  )
  with pltpu.force_tpu_interpret_mode(params):
    try:
      out = jax.block_until_ready(nx.jit(fun)(*args))
    except jax.errors.JaxRuntimeError as error:
      if 'RACE DETECTED' not in str(error):
        raise
      return None, str(error)
  return out, capsys.readouterr().out


def toy(x, wait_first):
  """Copies x into scratch and doubles it, perhaps before it is there."""

  def kernel(x_ref, y_ref, scratch, sem):
    copy = pltpu.make_async_copy(x_ref, scratch, sem)
    copy.start()
    if wait_first:
      copy.wait()
    y_ref[...] = 2 * scratch[...]
    if not wait_first:
      copy.wait()

  return pl.pallas_call(
      kernel,
      in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
      out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
      scratch_shapes=[
          pltpu.VMEM((8, 128), jnp.float32),
          pltpu.SemaphoreType.DMA,
      ],
      interpret=nx.interpret(),
  )(x)


def test_a_race_is_found(capsys):
  x = samples.normal(0, (8, 128))
  out, said = watched(functools.partial(toy, wait_first=True), [x], capsys)
  assert said == ''
  np.testing.assert_array_equal(out, 2 * x)
  _, said = watched(functools.partial(toy, wait_first=False), [x], capsys)
  assert 'RACE DETECTED' in said


def check(fun, args, capsys):
  """The kernels race not, and agree with `fun` of XLA; fun(*args, impl)."""
  ours = functools.partial(fun, impl='pallas')
  out, said = watched(ours, args, capsys)
  assert said == ''
  expected = nx.jit(functools.partial(fun, impl='xla'))(*args)
  for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
    samples.close(a, b)


FORMS = {
    'window': dict(window=11),
    'window sink page': dict(window=11, sink_page=True),
    'block': dict(block=True),
}


def attend(q, kv, layout, impl, *, block=False, **options):
  if block:  # the first page, wherever it is past
    first = layout.positions_T // PAGE > 0
    options['selected_TKj'] = jnp.where(first, 0, -1)[:, None, None]
  return attention.paged_attention(
      q, kv, layout, numerics=NUM, impl=impl, **options
  )


@pytest.mark.parametrize(
    'form',
    [
        'window',
        pytest.param('window sink page', marks=pytest.mark.slow),
        'block',
    ],
)
def test_attention_of_rows(form, capsys):
  """Forward and backward; two sequences, of one and of three pages."""
  positions = jnp.asarray([[*range(8), *range(24)]])
  q = samples.normal(0, (32, 2, WIDTH))
  kv = samples.normal(1, (4, PAGE, 1, 2 * WIDTH))

  def run(q, kv, positions, impl):
    layout = layouts.row_layout(positions, PAGE)
    fun = lambda q, kv: attend(q, kv, layout, impl, **FORMS[form])
    out, pull = jax.vjp(fun, q, kv)
    return out, pull(out)

  check(run, [q, kv, positions], capsys)


def test_attention_of_the_engine(capsys):
  """One token of each of three sequences, of one, two and six pages."""
  positions = np.asarray([3, 12, 45], np.int32)
  q = samples.normal(0, (3, 2, WIDTH))
  kv = samples.normal(1, (10, PAGE, 1, 2 * WIDTH))
  table = np.arange(18, dtype=np.int32).reshape(3, 6) % 10
  lanes = np.full((3, layouts.QUERY_TILE), 3, np.int32)
  lanes[np.arange(3), positions % 8] = np.arange(3)
  place = np.arange(3) * 8 + positions % 8

  def run(q, kv, impl):
    layout = layouts.Layout(
        *map(jnp.asarray, (positions, np.arange(3), table, lanes, place))
    )
    return attend(q, kv, layout, impl)

  check(run, [q, kv], capsys)


def test_grouped_matmul(capsys):
  """Forward, and backward of rows and of weights; an expert without rows."""
  experts = jnp.asarray(np.arange(40)[:, None] % 5 % 3 * 2, jnp.int32)
  x, w = samples.normal(0, (40, 16)), samples.normal(1, (5, 16, 24))

  def run(x, w, experts, impl):
    plan = grouped.plan(experts, 5)
    rows = grouped.dispatch(x, plan)
    fun = lambda x, w: grouped.grouped_matmul(
        x, w, plan, numerics=NUM, impl=impl
    )
    out, pull = jax.vjp(fun, rows, w)
    return out, pull(out)

  check(run, [x, w, experts], capsys)
