"""Norm, rotary positions, router and gate: by hand, in value, in bits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lanes
from kernels_pallas import numerics as nx
from kernels_pallas.row_ops import ops
from tests.kernels import samples

F32 = samples.EXACT['float32']
DTYPES = samples.DTYPES
ALL = ['reference', 'xla', 'pallas']
FAST = ['xla', 'pallas']


def norm(dtype, impl):
  num = samples.EXACT[dtype]
  return lambda x, g: ops.rms_norm(x, g, numerics=num, impl=impl)


def rope(dtype, impl, theta=1e4):
  num = samples.EXACT[dtype]
  return lambda x, p: ops.rope(x, p, numerics=num, theta=theta, impl=impl)


def gate(dtype, impl):
  num = samples.EXACT[dtype]
  return lambda x, y: ops.swiglu(x, y, numerics=num, impl=impl)


def router(topk, gating, impl='xla'):
  return lambda logits, bias: ops.router(
      logits, bias, topk=topk, gating=gating, numerics=F32, impl=impl
  )


# Hand-computed values: the reference first, then what is shared with it.


@pytest.mark.parametrize('impl', ALL)
def test_norm_by_hand(impl):
  x, gain = jnp.asarray([[3.0, 4.0, 0, 0]]), jnp.asarray([1.0, 2, 1, 1])
  y = jax.jit(norm('float32', impl))(x, gain)  # root mean square is 2.5
  np.testing.assert_allclose(y, [[1.2, 3.2, 0, 0]], rtol=1e-6)
  zero = norm('float32', impl)(jnp.zeros((1, 4)), gain)
  np.testing.assert_array_equal(zero, np.zeros((1, 4)))


@pytest.mark.parametrize('impl', ALL)
def test_rope_by_hand(impl):
  x = jnp.asarray([[[1.0, 2, 3, 4]]] * 2)
  y = jax.jit(rope('float32', impl, theta=100.0))(x, jnp.asarray([0, 2]))
  np.testing.assert_array_equal(y[0], x[0])
  # Pairs (1, 3) and (2, 4) turn by 2 and by 2 · 100^(-1/2) = 0.2 radians.
  c, s, c2, s2 = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)
  expected = [c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2]
  np.testing.assert_allclose(y[1, 0], expected, rtol=1e-5)


@pytest.mark.parametrize('impl', ALL)
def test_gate_by_hand(impl):
  y = jax.jit(gate('float32', impl))(
      np.asarray([[0.0, math.log(3)]]), np.ones((1, 2))
  )
  np.testing.assert_allclose(y, [[0, math.log(3) * 0.75]], rtol=1e-6)


@pytest.mark.parametrize('impl', ALL)
def test_router_by_hand(impl):
  logits = jnp.asarray([[0.0, math.log(3), -1, math.log(1.5)]])
  weights, experts = jax.jit(router(2, 'softmax', impl))(logits, jnp.zeros(4))
  np.testing.assert_array_equal(experts, [[1, 3]])
  np.testing.assert_allclose(weights, [[2 / 3, 1 / 3]], rtol=1e-6)
  # σ = 0.5, 0.75, 0.27, 0.6: the bias lifts expert 0 over 3, and only that.
  bias = jnp.asarray([0.2, 0, 0, 0])
  weights, experts = jax.jit(router(2, 'sigmoid', impl))(logits, bias)
  np.testing.assert_array_equal(experts, [[1, 0]])
  np.testing.assert_allclose(weights, [[0.6, 0.4]], rtol=1e-6)
  weights, experts = jax.jit(router(2, 'softmax', impl))(logits, 10 * bias)
  np.testing.assert_array_equal(experts, [[0, 1]])
  np.testing.assert_allclose(weights, [[0.25, 0.75]], rtol=1e-6)


@pytest.mark.parametrize('gating', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('impl', ALL)
def test_router_ties_take_the_lower_id(impl, gating):
  logits = jnp.asarray([[1.0, 2, 2, 1, 2], [0, 0, 0, 0, 0], [0, -0.0, 0, 0, 0]])
  _, experts = jax.jit(router(4, gating, impl))(logits, jnp.zeros(5))
  expected = [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
  np.testing.assert_array_equal(experts, expected)


# Against the reference.


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(1, 8), (5, 96), (7, 3, 16)])
def test_norm_values_and_gradients(dtype, shape, impl):
  args = samples.normal(0, shape, dtype), samples.normal(1, shape[-1:], dtype)
  g = samples.normal(2, shape, dtype)
  y, grads = samples.gradients(norm(dtype, impl), args, g)
  y_ref, grads_ref = samples.gradients(norm(dtype, 'reference'), args, g)
  samples.close(y, y_ref, dtype)
  for a, b in zip(grads, grads_ref):
    samples.close(a, b, dtype)


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [16, 256])
def test_rope_values_and_gradients(dtype, width, impl):
  x = samples.normal(0, (9, 3, width), dtype)
  p = jnp.asarray([0, 1, 7, 8, 15, 16, 17, 200, 500])
  g = samples.normal(1, x.shape, dtype)
  pull = lambda impl: samples.gradients(
      lambda x: rope(dtype, impl)(x, p), (x,), g
  )
  (y, (dx,)), (y_ref, (dx_ref,)) = pull(impl), pull('reference')
  # One rounding of an angle of 500 radians is 3e-5.
  samples.close(y, y_ref, dtype, scale=4)
  samples.close(dx, dx_ref, dtype, scale=4)


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
def test_gate_values_and_gradients(dtype, impl):
  args = samples.normal(0, (9, 24), dtype), samples.normal(1, (9, 24), dtype)
  g = samples.normal(2, (9, 24), dtype)
  y, grads = samples.gradients(gate(dtype, impl), args, g)
  y_ref, grads_ref = samples.gradients(gate(dtype, 'reference'), args, g)
  samples.close(y, y_ref, dtype)
  for a, b in zip(grads, grads_ref):
    samples.close(a, b, dtype)


@pytest.mark.parametrize('impl', ALL)
@pytest.mark.parametrize('gating', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('topk', [1, 3, 8])
def test_router_values_and_gradients(gating, topk, impl):
  args = samples.normal(0, (33, 8)), samples.normal(1, (8,), scale=0.3)
  g = samples.normal(2, (33, topk))

  @functools.partial(jax.jit, static_argnums=0)
  def run(fun):
    weights, pull, experts = jax.vjp(fun, *args, has_aux=True)
    return weights, experts, *pull(g)

  # The derivative of the reference is plain differentiation of itself.
  def reference(logits, bias):
    return ops.reference.router(logits, bias, topk, gating, F32)

  weights, experts, d_logits, d_bias = run(router(topk, gating, impl))
  for a, b in zip((weights, experts, d_logits, d_bias), run(reference)):
    samples.close(a, b)
  np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
  assert experts.dtype == jnp.int32
  assert not np.any(d_bias)  # the bias is moved by load only
  if topk > 1:
    chosen = np.take_along_axis(np.asarray(d_logits), np.asarray(experts), -1)
    assert (np.abs(chosen) > 0).mean() > 0.99
  assert np.count_nonzero(d_logits) <= 33 * topk


@pytest.mark.parametrize('impl', ALL)
@pytest.mark.parametrize('gating', ['softmax', 'sigmoid'])
def test_router_weights(gating, impl):
  """Of given experts: by hand, in gradient, and the router's own bits."""
  weigh = lambda logits, experts: ops.router_weights(
      logits, experts, gating=gating, numerics=F32, impl=impl
  )
  logits = np.float32([[0, np.log(2), 7, np.log(3)]])
  chosen = np.float32([1, 3] if gating == 'softmax' else [1 / 2, 3 / 4])
  found = jax.jit(weigh)(logits, np.int32([[0, 3]]))
  np.testing.assert_allclose(found[0], chosen / chosen.sum(), rtol=1e-6)

  args = samples.normal(0, (70, 8)), samples.normal(1, (8,), scale=0.3)
  g = samples.normal(2, (70, 3))

  def free(logits, bias):
    weights, pull, experts = jax.vjp(
        router(3, gating, impl), logits, bias, has_aux=True
    )
    return weights, experts, pull(g)[0]

  def given(logits, experts):
    weights, pull = jax.vjp(lambda x: weigh(x, experts), logits)
    return weights, pull(g)[0]

  weights, experts, slope = nx.jit(free)(*args)
  again, same_slope = nx.jit(given)(args[0], experts)
  (samples.same_bits if impl in FAST else samples.close)(again, weights)
  samples.close(same_slope, slope)
  # Foreign experts, in another order of slots: plain differentiation.
  others = np.random.default_rng(3).random((70, 8)).argsort(-1)[:, :3]
  expected = jax.vjp(
      lambda x: ops.reference.router_weights(x, others, gating, F32), args[0]
  )
  found, slope = nx.jit(given)(args[0], others.astype(np.int32))
  samples.close(found, expected[0])
  samples.close(slope, expected[1](g)[0])


def test_router_weights_bad_shapes():
  with pytest.raises(ValueError, match=r'experts_Tk \(2, 1\): expected'):
    ops.router_weights(
        jnp.ones((3, 4)), jnp.ones((2, 1)), gating='softmax', numerics=F32
    )
  with pytest.raises(ValueError, match="gating='tanh'"):
    ops.router_weights(
        jnp.ones((3, 4)), jnp.ones((3, 1)), gating='tanh', numerics=F32
    )


@pytest.mark.parametrize('gating', ['softmax', 'sigmoid'])
def test_router_on_tpu_chooses_each_expert_once(gating):
  """Also in rows of padding, whose experts are counted with the others."""
  logits = samples.nan_but((5, 6), {1: np.arange(6), 3: np.full(6, -np.inf)})
  logits[4] = [np.nan, 1, np.nan, 3, -np.inf, 2]
  _, experts = jax.jit(router(6, gating, 'pallas'))(logits, jnp.zeros(6))
  np.testing.assert_array_equal(np.sort(experts, -1), [np.arange(6)] * 5)
  np.testing.assert_array_equal(experts[4, :3], [3, 5, 1])


# Bits.


@pytest.mark.parametrize('count', [1, 2, 3, 16, 96, 128, 1000])
def test_sums_of_kernels_are_tree_sums_in_bits(count):
  x = samples.normal(0, (8, count)) * np.exp(samples.normal(1, (8, count)))
  x[1] = -0.0
  expected = nx.jit(F32.tree_sum)(x)

  sums = nx.jit(lambda x: lanes.column(lanes.row_sums(x, F32)))
  samples.same_bits(sums(x)[:, 0], expected)
  parts = nx.jit(lambda x: lanes.tree_add(list(x.T)))
  samples.same_bits(parts(x[2:]), expected[2:])


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
def test_rows_are_pure(dtype, impl):
  num = samples.EXACT[dtype]

  def all_ops(x, gain, positions, bias):
    y = norm(dtype, impl)(x, gain)
    heads = y.reshape(len(y), 3, 16)
    choice = [
        ops.router(
            0.5 * x[:, :8],
            bias,
            topk=3,
            gating=gating,
            numerics=num,
            impl=impl,
        )
        for gating in ('softmax', 'sigmoid')
    ]
    turned = rope(dtype, impl)(heads, positions)
    return y, turned, gate(dtype, impl)(x, y), choice

  def loss(x, *args):
    out = all_ops(x, *args)
    return sum(v.sum() for v in jax.tree.leaves(out[:3])), out

  fun = nx.jit(all_ops)
  gradient = nx.jit(lambda *a: jax.value_and_grad(loss, has_aux=True)(*a)[0][1])
  gain, bias = samples.normal(0, (48,), dtype), samples.normal(1, (8,))
  x = samples.normal(2, (67, 48), dtype)
  p = np.random.default_rng(3).integers(0, 300, 67).astype(np.int32)
  full = fun(x, gain, p, bias)

  def check(out, rows):
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(full)):
      samples.same_bits(np.asarray(a)[: len(rows)], np.asarray(b)[rows])

  check(gradient(x, gain, p, bias), np.arange(67))
  order = np.random.default_rng(4).permutation(67)
  check(fun(x[order], gain, p[order], bias), order)
  check(fun(x[5:6], gain, p[5:6], bias), np.asarray([5]))
  few = np.concatenate([x[9:12], np.full((5, 48), np.nan, np.float32)])
  company = np.concatenate([p[9:12], np.zeros(5, np.int32)])
  check(fun(few, gain, company, bias), np.arange(9, 12))


def test_rows_are_pure_over_several_blocks():
  """Row 1000 of 1030 lies in another block than row 0 of one."""
  x, gain = samples.normal(0, (1030, 16)), samples.normal(1, (16,))
  p = np.arange(1030, dtype=np.int32)

  def run(x, p):
    y = norm('float32', 'pallas')(x, gain)
    turned = rope('float32', 'pallas')(y[:, None], p)
    gated = gate('float32', 'pallas')(x, y)
    return y, turned, gated, *router(4, 'softmax', 'pallas')(x, gain)

  fun = nx.jit(run)
  for a, b in zip(fun(x[1000:1001], p[1000:1001]), fun(x, p)):
    samples.same_bits(np.asarray(a)[0], np.asarray(b)[1000])


@pytest.mark.parametrize(
    ('call', 'match'),
    [
        (lambda: norm('float32', 'xla')(jnp.ones((2, 4)), jnp.ones(3)), 'gain'),
        (
            lambda: rope('float32', 'xla')(jnp.ones((2, 1, 3)), jnp.arange(2)),
            r'x_TNH \(2, 1, 3\): expected .* even H',
        ),
        (
            lambda: rope('float32', 'xla')(jnp.ones((2, 1, 4)), jnp.arange(3)),
            r'positions_T \(3,\)',
        ),
        (
            lambda: rope('float32', 'xla', -1.0)(
                jnp.ones((2, 1, 4)), jnp.arange(2)
            ),
            r'theta=-1.0: must be above 0',
        ),
        (
            lambda: router(5, 'softmax')(jnp.ones((2, 4)), jnp.ones(4)),
            r'topk=5: allowed is 1..4',
        ),
        (
            lambda: router(0, 'softmax')(jnp.ones((2, 4)), jnp.ones(4)),
            r'topk=0: allowed is 1..4',
        ),
        (
            lambda: router(2, 'tanh')(jnp.ones((2, 4)), jnp.ones(4)),
            "gating='tanh': allowed are 'softmax' and 'sigmoid'",
        ),
        (
            lambda: router(2, 'softmax')(jnp.ones((2, 4)), jnp.ones(3)),
            r'bias_E \(3,\)',
        ),
        (
            lambda: gate('float32', 'xla')(jnp.ones((2, 4)), jnp.ones((2, 3))),
            r'up_TF \(2, 3\): must be equal',
        ),
        (
            lambda: norm('float32', 'cuda')(jnp.ones((2, 4)), jnp.ones(4)),
            "impl='cuda' of rms_norm: allowed",
        ),
    ],
)
def test_bad_input(call, match):
  with pytest.raises(ValueError, match=match):
    call()
