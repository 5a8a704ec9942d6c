"""Routing replay: recorded experts are used, unknown ones are not invented."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.policy import forward as forward_lib
from agentic_rl.policy import routing
from kernels_pallas import numerics as nx
from kernels_pallas.paged_attention import layout as layouts
from tests.learner import plain
from tests.rollout import samples

CFG = samples.config(layers=2, pattern='w', experts=6, topk_experts=3)
SHAPE = (CFG.moe_layers, 64, CFG.topk_experts)
TOKENS = np.random.default_rng(0).integers(0, CFG.vocab, 64).astype(np.int32)


@pytest.fixture(scope='module')
def weights():
  return samples.weights(CFG)


@functools.cache
def program():
  """(weights, replayed experts, weights) -> hidden rows, routes, weights."""
  layout = layouts.row_layout(jnp.arange(64)[None], CFG.page)

  def run(w, experts, values):
    given = routing.Routes(experts, values)
    x, routes, _ = forward_lib.forward(
        w, TOKENS, layout, CFG, replay=given, route_weights=True
    )
    return x, routes.experts, routes.weights

  return nx.jit(run)


UNKNOWN = np.full(SHAPE, -1, np.int32)


def bits(x):
  return np.asarray(x).view(np.int32)


def foreign(seed=1):
  """Distinct random experts for every token, and weights that add up to 1."""
  rng = np.random.default_rng(seed)
  order = rng.random((*SHAPE[:2], CFG.experts)).argsort(-1)
  values = rng.dirichlet(np.ones(SHAPE[2]), SHAPE[:2]).astype(np.float32)
  return order[..., : SHAPE[2]].astype(np.int32), values


@pytest.fixture(scope='module')
def free(weights):
  """What the policy does by itself: every route is unknown."""
  return program()(weights, UNKNOWN, None)


def test_unknown_routes_are_free(weights, free):
  """-1 is nobody, not expert 0; half a route is none (case 7)."""
  layout = layouts.row_layout(jnp.arange(64)[None], CFG.page)
  plain_program = nx.jit(
      lambda w: forward_lib.forward(w, TOKENS, layout, CFG)[:2]
  )
  x, routes = plain_program(weights)
  np.testing.assert_array_equal(bits(x), bits(free[0]))
  np.testing.assert_array_equal(routes, free[1])
  half = UNKNOWN.copy()
  half[..., 0] = 0
  np.testing.assert_array_equal(
      bits(program()(weights, half, None)[0]), bits(free[0])
  )


def test_own_routes_give_the_same_bits(weights, free):
  x, routes, values = free
  for given in ((routes, None), (routes, values)):
    again = program()(weights, *given)
    for a, b in zip(again, free):
      np.testing.assert_array_equal(bits(a), bits(b))
  # A short capture: what is known is the beginning (case 7).
  short = np.array(routes)
  short[:, 20:] = -1
  again = program()(weights, short, values)
  np.testing.assert_array_equal(bits(again[0]), bits(x))


def test_row_i_belongs_to_token_i(weights, free):
  """One foreign route changes its own token and what looks back at it."""
  given = UNKNOWN.copy()
  given[0, 30] = (np.asarray(free[1])[0, 30] + 1) % CFG.experts
  x, _, _ = program()(weights, given, None)
  same = (bits(x) == bits(free[0])).all(-1)
  assert same[:30].all() and not same[30]
  assert same[30 + CFG.window * CFG.layers :].all()  # out of sight


def test_foreign_routes_go_to_the_foreign_experts(weights, free):
  """Against the plain policy with these experts, in this order of slots."""
  experts, values = foreign()
  for given in (None, values):
    x, own, used = program()(weights, experts, given)
    logits = np.asarray(x) @ np.asarray(weights['head'])
    z = jax.jit(lambda w, s: plain.decoder(w, TOKENS, CFG, 1.0, experts, s))(
        weights, given
    )
    np.testing.assert_allclose(jax.nn.log_softmax(logits), z, atol=2e-4)
    if given is not None:
      np.testing.assert_array_equal(bits(used), bits(given))
    # The first router's own choice is reported, not the replayed one.
    np.testing.assert_array_equal(own[0], free[1][0])
  # The order of slots is the order of weights (case 5).
  turned = program()(weights, experts[..., ::-1].copy(), values)[0]
  assert np.abs(np.asarray(turned) - np.asarray(x)).max() > 1e-3


def test_the_router_has_a_gradient(weights):
  """Case 6: asserted per layer, and that of 'ids' is the plain policy's.

  Recorded weights that are those of 'ids' have the same gradient: it goes
  through the router although the value does not.
  """
  experts, _ = foreign()
  layout = layouts.row_layout(jnp.arange(64)[None], CFG.page)
  _, _, values = program()(weights, experts, None)

  def loss(w, values):
    given = routing.Routes(experts, values)
    x = forward_lib.forward(w, TOKENS, layout, CFG, replay=given)[0]
    return jax.nn.log_softmax(x @ w['head'], -1)[:, :5].sum()

  def reference(w):
    return plain.decoder(w, TOKENS, CFG, 1.0, routes=experts)[:, :5].sum()

  gradient = nx.jit(jax.grad(loss))
  expected = jax.jit(jax.grad(reference))(weights)['pattern'][0]['router']
  for given in (None, values):
    grads = gradient(weights, given)['pattern'][0]
    router = np.asarray(grads['router'])
    assert (np.abs(router).max((1, 2)) > 1e-2).all()
    np.testing.assert_allclose(router, expected, atol=2e-3, rtol=1e-3)
    assert not np.any(grads['balance'])


def test_straight_through():
  value, source = jnp.asarray([0.3, 0.7]), jnp.asarray([0.9, 0.1])
  out, pull = jax.vjp(routing._straight_through, value, source)
  np.testing.assert_array_equal(bits(out), bits(value))
  to_value, to_source = pull(jnp.asarray([2.0, 3.0]))
  assert not np.any(to_value)
  np.testing.assert_array_equal(to_source, [2, 3])


@pytest.mark.slow
def test_engine_and_learner_record_and_replay(weights):
  """Prefix hits carry weights; a stale sampler's forward is reproduced.

  The learner's routers differ from the sampler's, everything else is equal:
  with the recorded routes and weights its log-probs are those recorded, to the
  bit; with its own they are not.
  """
  scripts = samples.traffic(CFG, 24, 1)
  engine = samples.make_engine(CFG, weights_=weights, route_weights=True)
  played = samples.play(engine, scripts)
  assert engine.pages.hits > 4
  plain_engine = samples.make_engine(CFG, weights_=weights)
  without = samples.play(plain_engine, scripts)
  examples = []
  for number, one in played.items():
    routes = routing.split(one.routes)
    known = routes['routes'] >= 0
    assert known[: len(one.tokens) - 1].all()  # also what hits brought (case 8)
    np.testing.assert_array_equal(routes['routes'], without[number].routes)
    np.testing.assert_array_equal(bits(one.logp), bits(without[number].logp))
    sums = routes['route_weights'].sum(-1)
    np.testing.assert_allclose(sums[known.all(-1)], 1, rtol=1e-6)
    assert (routes['route_weights'][~known] == -1).all()
    examples.append(
        pack_lib.Example(
            one.tokens, one.sampled.astype(np.float32), 0 * one.logp, one.logp,
            one.sampled, one.routes,
        )  # fmt: skip
    )
  batch = pack_lib.pack(examples, row_tokens=64, page=CFG.page, rows=1)
  router = weights['pattern'][0]['router']
  other = dict(weights['pattern'][0], router=router[..., ::-1])
  stale = weights | {'pattern': {0: other}}

  @functools.cache
  def logps(mode):
    fun = lambda w, b: update.policy_logprobs(w, b, CFG, 1.0, replay=mode)
    return nx.jit(fun)

  def unequal(w, mode):
    wrong = flips = 0
    for part in pack_lib.microbatches(batch, 1):
      inputs = inputs_lib.flatten(part)
      logp, _, routes = logps(mode)(w, inputs)
      places = inputs['rows'][inputs['rows'] < 64]
      recorded = inputs['logp_behavior'][places]
      wrong += int((bits(logp)[: len(places)] != bits(recorded)).sum())
      own = np.asarray(routes).transpose(1, 0, 2)
      flips += int((own != inputs['routes'])[inputs['routes'] >= 0].sum())
    return wrong, flips

  total = int(batch.sampled_BT.sum())
  for mode in ('none', 'ids', 'ids_and_weights'):
    assert unequal(weights, mode) == (0, 0), mode
  wrong, flips = unequal(stale, 'ids_and_weights')
  assert wrong == 0 and flips > total  # routers differ, and it is still seen
  assert unequal(stale, 'ids')[0] > 0.9 * total
  assert unequal(stale, 'none')[0] > 0.9 * total


def routes_of(experts, weigh=True):
  experts = np.asarray(experts, np.int16)
  values = np.ones(experts.shape, np.float32)
  return routing.join(experts, values) if weigh else experts


@pytest.mark.parametrize(
    ('routes', 'mode', 'match'),
    [
        (None, 'ids', 'the batch holds no routes'),
        (routes_of(np.zeros((4, 2, 3)), False), 'ids_and_weights',
         'hold no weights'),
        (routes_of(np.zeros((4, 2, 2))), 'ids', r'routes \(4, 2, 2\)'),
        (routes_of(np.full((4, 2, 3), 6)), 'ids', r'experts -1..6: allowed'),
        (routes_of(np.full((4, 2, 3), -2)), 'ids', r'experts -2..-1: allowed'),
    ],
)  # fmt: skip
def test_bad_routes(routes, mode, match):
  with pytest.raises(ValueError, match=match):
    routing.check_recorded(routes, mode, CFG)
  dense = samples.config(experts=0)
  with pytest.raises(ValueError, match='the policy has no experts'):
    routing.check_recorded(routes, mode, dense)


def test_good_routes():
  for mode in ('ids', 'ids_and_weights'):
    routing.check_recorded(routes_of(np.full((4, 2, 3), 5)), mode, CFG)
    routing.check_recorded(routes_of(UNKNOWN.swapaxes(0, 1)), mode, CFG)


def test_packing_keeps_unknown_routes_unknown():
  """Also with weights: padding, short captures and examples without routes."""

  def example(routes):
    zeros = np.zeros(9, np.float32)
    return pack_lib.Example(
        np.arange(9, dtype=np.int32), zeros, zeros, zeros, zeros > 0, routes
    )

  known = routes_of(np.ones((9, 2, 3)))
  known[7:] = -1
  batch = pack_lib.pack(
      [example(known), example(None)], row_tokens=64, page=8, rows=1
  )
  (part,) = pack_lib.microbatches(batch, 2)
  found = inputs_lib.flatten(part)
  assert found['routes'].shape == (128, 2, 3)
  assert (found['routes'][:7] == 1).all() and (found['routes'][7:] == -1).all()
  assert (found['route_weights'][:7] == 1).all()
  assert (found['route_weights'][7:] == -1).all()
  with pytest.raises(ValueError, match='all or none must have weights'):
    mixed = [example(known), example(known['expert'])]
    pack_lib.pack(mixed, row_tokens=64, page=8, rows=1)
