"""Mixture-of-experts product: no drops, empty experts, equal to dense."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.grouped_matmul import ops
from kernels_pallas.grouped_matmul import pallas_tpu
from tests.kernels import samples

DTYPES = samples.DTYPES
IMPLS = ('xla', 'pallas')
T, K, E, D, F = 70, 2, 5, 16, 24


def choices(case):
  rng = np.random.default_rng(0)
  if case == 'one':
    return np.full((T, K), 3, np.int32)
  allowed = {'all': range(E), 'empty': (1, 4)}[case]
  rows = [rng.permutation(list(allowed))[:K] for _ in range(T)]
  return np.asarray(rows, np.int32)


def mixture(dtype, impl='xla'):
  num = samples.EXACT[dtype]

  def run(x, weights, w, experts):
    plan = ops.plan(experts, w.shape[0])
    y = ops.grouped_matmul(
        ops.dispatch(x, plan), w, plan, numerics=num, impl=impl
    )
    return ops.combine(num.cast(y), weights, plan, numerics=num)

  return run


def dense(dtype):
  """Every expert computed for every token, then picked."""
  num = samples.EXACT[dtype]

  def run(x, weights, w, experts):
    y = num.cast(jnp.einsum('td,edf->tef', x, w, precision='highest'))
    picked = jnp.take_along_axis(y, experts[..., None], 1)
    return (picked * weights[..., None]).sum(1)

  return run


def test_plan_by_hand():
  # Expert 2 takes slots 0, 3 and 5, expert 0 takes 1 and 4, expert 1 takes 2.
  experts = jnp.asarray([[2, 0], [1, 2], [0, 2]], jnp.int32)
  plan = jax.jit(ops.plan, static_argnums=1)(experts, 4)
  tile = ops.GROUP_TILE
  np.testing.assert_array_equal(
      plan.row_of_slot_Tk,
      [[2 * tile, 0], [tile, 2 * tile + 1], [1, 2 * tile + 2]],
  )
  slots = np.asarray(plan.slot_of_row_R)
  np.testing.assert_array_equal(slots[:3], [1, 4, 6])
  np.testing.assert_array_equal(slots[tile : tile + 2], [2, 6])
  np.testing.assert_array_equal(slots[2 * tile : 2 * tile + 4], [0, 3, 5, 6])
  # One tile each; the rest hold no slot.
  np.testing.assert_array_equal(plan.expert_of_tile, [0, 1, 2, 4])


def test_height_of_a_tile():
  experts = jnp.zeros((70, 2), jnp.int32)
  assert ops.group_tile(140, 3) == ops.GROUP_TILE == 48
  plan = ops.plan(experts, 3, tile=16)
  np.testing.assert_array_equal(plan.expert_of_tile, [0] * 9 + [3] * 2)
  assert plan.slot_of_row_R.shape == (11 * 16,)
  with nx.target('tpu'):
    assert ops.group_tile(767, 3) == 128
    assert ops.group_tile(768, 3) == 256
    plan = ops.plan(experts, 3)
  np.testing.assert_array_equal(plan.expert_of_tile, [0] * 2 + [3] * 2)
  assert plan.slot_of_row_R.shape == (4 * 128,)


@pytest.mark.parametrize('impl', ['reference', *IMPLS])
def test_mixture_by_hand(impl):
  x = jnp.asarray([[1.0, 2], [3, 4]])
  w = jnp.asarray([[[1.0], [0]], [[0], [1]], [[1], [1]]])
  experts = jnp.asarray([[2, 0], [1, 2]], jnp.int32)
  weights = jnp.asarray([[0.75, 0.25], [0.5, 0.5]])
  y = jax.jit(mixture('float32', impl))(x, weights, w, experts)
  np.testing.assert_array_equal(y, [[0.75 * 3 + 0.25], [0.5 * 4 + 0.5 * 7]])


@pytest.mark.parametrize('case', ['all', 'empty', 'one'])
def test_no_slot_is_dropped(case):
  experts = choices(case)
  plan = jax.jit(ops.plan, static_argnums=1)(experts, E)
  rows, slots = np.asarray(plan.row_of_slot_Tk), np.asarray(plan.slot_of_row_R)
  np.testing.assert_array_equal(
      slots[rows.reshape(-1)], np.arange(T * K), 'every slot has its own row'
  )
  assert (slots < T * K).sum() == T * K
  tile = np.asarray(plan.expert_of_tile)
  np.testing.assert_array_equal(tile[rows // ops.GROUP_TILE], experts)
  assert len(slots) == len(tile) * ops.GROUP_TILE


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_equal_to_dense(dtype, impl):
  x = jnp.asarray(samples.normal(0, (T, D), dtype))
  w = jnp.asarray(samples.normal(1, (E, D, F), dtype))
  weights = jnp.asarray([[0.75, 0.25]] * T)
  g = samples.normal(3, (T, F), dtype)

  def pull(fun):
    def run(experts):
      f = functools.partial(fun, experts=experts)
      value, back = jax.vjp(f, x, weights, w)
      return value, *back(g)

    return nx.jit(run)

  ours, reference, by_all = map(
      pull, (mixture(dtype, impl), mixture(dtype, 'reference'), dense(dtype))
  )
  for case in ('all', 'empty', 'one'):
    experts = choices(case)
    results = ours(experts)
    for a, b, c in zip(results, reference(experts), by_all(experts)):
      samples.close(a, b, dtype)
      samples.close(b, c, dtype)
    unused = sorted(set(range(E)) - set(experts.reshape(-1).tolist()))
    assert not np.any(np.asarray(results[3])[unused])


@pytest.mark.parametrize('impl', IMPLS)
def test_tiles_without_slots_are_zeros(impl):
  experts = choices('empty')
  plan = ops.plan(experts, E)
  x = samples.normal(0, (T, D))
  w = jnp.asarray(samples.normal(1, (E, D, F))).at[0].set(jnp.nan)
  num = samples.EXACT['float32']
  run = lambda x, w: ops.grouped_matmul(
      ops.dispatch(x, plan), w, plan, numerics=num, impl=impl
  )
  y = np.asarray(nx.jit(run)(x, w))
  slots = np.asarray(plan.slot_of_row_R)
  assert not y[slots == T * K].any()
  assert y[slots < T * K].any(1).all()
  _, (_, dw) = samples.gradients(run, (x, w), np.ones_like(y))
  assert np.isfinite(dw).all()
  for e in (0, 2, 3):  # experts without a row, one before and two between
    samples.same_bits(dw[e], np.zeros((D, F), np.float32))


def test_blocks_of_columns(monkeypatch):
  # A block of 128 lanes at most: the second of two is short.
  monkeypatch.setattr(pallas_tpu.dense, 'COLUMNS', 128)
  experts = choices('empty')
  plan = ops.plan(experts, E, tile=16)
  w = np.random.default_rng(0).integers(-3, 4, (E, 200, 136))
  x = np.random.default_rng(1).integers(-3, 4, (T, 200))
  x, w = x.astype(np.float32), w.astype(np.float32)
  g = np.random.default_rng(2).integers(-3, 4, (T, K, 136)).astype(np.float32)
  num = samples.EXACT['float32']

  def run(impl):
    fun = lambda x, w: ops.slots(
        ops.grouped_matmul(
            ops.dispatch(x, plan), w, plan, numerics=num, impl=impl
        ),
        plan,
    )
    return samples.gradients(fun, (x, w), g)

  y, grads = run('pallas')
  y_ref, grads_ref = run('reference')
  for a, b in zip((y, *grads), (y_ref, *grads_ref)):
    np.testing.assert_array_equal(a, b)  # of small integers: exact


def test_steps_of_the_weight_gradient_by_hand():
  # Experts 0, 2 and 5 have no tile; expert 3 has three.
  expert = jnp.asarray([1, 3, 3, 3, 4, 6, 6, 6, 6], jnp.int32)
  steps, tile, owner, kind = pallas_tpu._visits(expert, 6)
  assert steps == 8
  clear, begin, add = pallas_tpu._CLEAR, pallas_tpu._BEGIN, pallas_tpu._ADD
  np.testing.assert_array_equal(owner[:8], [0, 1, 2, 3, 3, 3, 4, 5])
  np.testing.assert_array_equal(
      kind[:8], [clear, begin, clear, begin, add, add, begin, clear]
  )
  np.testing.assert_array_equal(tile[:8], [0, 0, 1, 1, 2, 3, 4, 4])
  # Of every split of 40 slots over 3 experts, the steps fit in the tiles.
  for first in range(41):
    for second in range(41 - first):
      sizes = np.array([first, second, 40 - first - second])
      tiles = -(-sizes // 16)
      assert np.maximum(tiles, 1).sum() <= 39 // 16 + 3


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_a_row_is_pure(dtype, impl):
  fun = nx.jit(mixture(dtype, impl))
  x, w = samples.normal(0, (T, D), dtype), samples.normal(1, (E, D, F), dtype)
  weights = np.asarray([[0.75, 0.25]] * T, np.float32)
  experts = choices('all')
  y = np.asarray(fun(x, weights, w, experts))
  order = np.random.default_rng(3).permutation(T)
  samples.same_bits(fun(x[order], weights[order], w, experts[order]), y[order])
  # Padding may hold anything, choose any expert and share the tile.
  few = samples.nan_but((9, D), {4: x[11]})
  fill = experts[11, 0]
  other = samples.nan_but((9, K), {4: experts[11]}, np.int32, fill)
  mix = samples.nan_but((9, K), {4: weights[11]})
  samples.same_bits(np.asarray(fun(few, mix, w, other))[4], y[11])

  def loss(x, w):
    out = mixture(dtype, impl)(x, weights, w, jnp.asarray(experts))
    return out.sum(), out

  gradient = nx.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  samples.same_bits(gradient(x, w)[0][1], y)


@pytest.mark.parametrize(
    ('call', 'match'),
    [
        (lambda p: ops.plan(jnp.zeros(3, jnp.int32), 2), r'experts_Tk \(3,\)'),
        (lambda p: ops.plan(jnp.zeros((3, 1), int), 0), 'num_experts=0'),
        (
            lambda p: ops.plan(jnp.zeros((3, 1), int), 2, 24),
            'tile=24: a multip',
        ),
        (
            lambda p: ops.grouped_matmul(
                jnp.zeros((p.slot_of_row_R.shape[0], D)),
                jnp.zeros((E, D, F), jnp.bfloat16),
                p,
                numerics=samples.FREE,
                impl='pallas',
            ),
            "rows and w_EDF float32 and bfloat16: impl='pallas' needs one",
        ),
        (
            lambda p: ops.grouped_matmul(
                jnp.zeros((4, D)),
                jnp.zeros((E, D, F)),
                p,
                numerics=samples.FREE,
            ),
            r'x_RD \(4, 16\): the plan and w_EDF \(5, 16, 24\) need',
        ),
        (
            lambda p: ops.grouped_matmul(
                jnp.zeros((4, D)), jnp.zeros((D, F)), p, numerics=samples.FREE
            ),
            r'w_EDF \(16, 24\): expected \[E, D, F\]',
        ),
        (
            lambda p: ops.combine(
                jnp.zeros((4, D)), jnp.zeros((T, K)), p, numerics=samples.FREE
            ),
            r'y_RD \(4, 16\) and weights_Tk',
        ),
        (
            lambda p: ops.grouped_matmul(
                jnp.zeros((p.slot_of_row_R.shape[0], D)),
                jnp.zeros((E, D, F)),
                p,
                numerics=samples.FREE,
                impl='fast',
            ),
            "impl='fast' of grouped_matmul: allowed",
        ),
    ],
)
def test_bad_input(call, match):
  with pytest.raises(ValueError, match=match):
    call(jax.jit(ops.plan, static_argnums=1)(choices('one'), E))
