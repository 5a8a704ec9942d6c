import dataclasses

import jax
import numpy as np
import pytest

from agentic_rl.rollout import engine as engine_lib
from tests.rollout import samples

CFG = samples.config()
PROMPT = tuple(range(3, 24))  # two full pages and five tokens


@pytest.fixture(scope='module')
def weights():
  return samples.weights(CFG)


@pytest.fixture
def engine(weights):
  """A fresh engine; the programs are shared by all of one shape."""
  return samples.make_engine(CFG, weights_=weights)


@pytest.fixture(scope='module')
def scripts():
  return samples.traffic(CFG, 12)


@pytest.fixture(scope='module')
def played(weights, scripts):
  """The scripts in lively company."""
  return samples.play(samples.make_engine(CFG, weights_=weights), scripts)


def draw(engine, slot, count):
  """Draws until the slot has `count` more tokens; returns (token, logp)s."""
  out = []
  while len(out) < count:
    out += [(d.token, d.logp) for d in engine.generate() if d.slot == slot]
  return out


# --- verbs ---


def test_the_life_of_a_sequence(engine):
  assert not engine.busy
  assert engine.generate() == []
  slot = engine.insert(7, PROMPT)
  assert engine.busy and engine.length(slot) == 21
  (first,) = engine.generate()
  assert first.slot == slot and engine.length(slot) == 22
  engine.pause(slot)
  assert engine.paused(slot) and not engine.busy
  assert engine.generate() == []
  engine.prefill(slot, [1, 2, 3])
  assert not engine.paused(slot) and engine.busy
  (second,) = engine.generate()
  tokens, routes = engine.release(slot)
  assert tokens == [*PROMPT, first.token, 1, 2, 3, second.token]
  assert routes.shape == (26, 4, 2) and routes.dtype == np.int16
  assert engine.pages.in_use == 0
  # A chunk of one token counts as decoding, a longer one as prefill.
  counts = dict(steps=2, decoded=2, prefilled=25, padded=103)
  assert {k: engine.counts[k] for k in counts} == counts


def test_drawn_tokens_and_logps_are_plain(engine):
  engine.insert(0, PROMPT)
  (item,) = engine.generate()
  assert isinstance(item.token, int) and 0 <= item.token < CFG.vocab
  assert np.float32(item.logp) == item.logp < 0


@pytest.mark.parametrize(
    'call',
    [
        lambda e: e.generate() or e.length(0),
        lambda e: e.prefill(0, [1]),
        lambda e: e.pause(0),
        lambda e: e.paused(3),
        lambda e: e.release(0),
    ],
)
def test_an_empty_slot_is_an_error(engine, call):
  with pytest.raises(KeyError, match='holds no sequence'):
    call(engine)


def test_a_slot_is_released_once(engine):
  slot = engine.insert(0, PROMPT)
  engine.release(slot)
  with pytest.raises(KeyError, match=f'slot {slot}'):
    engine.release(slot)


@pytest.mark.parametrize('length', [0, 64, 65])
def test_prompts_that_do_not_fit(engine, length):
  with pytest.raises(ValueError, match=f'prompt of {length} tokens: 1..63'):
    engine.insert(0, [1] * length)
  assert engine.pages.in_use == 0
  slot = engine.insert(0, [1] * 63)
  assert len(draw(engine, slot, 1)) == 1
  with pytest.raises(ValueError, match='do not fit the context of 64'):
    engine.prefill(slot, [1])


def test_prefill_up_to_the_context(engine):
  slot = engine.insert(0, PROMPT)
  draw(engine, slot, 2)
  with pytest.raises(ValueError, match='23 . 41 tokens do not fit'):
    engine.prefill(slot, [1] * 41)
  assert engine.length(slot) == 23  # nothing was appended
  engine.prefill(slot, [1] * 40)
  draw(engine, slot, 1)
  assert engine.length(slot) == 64


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(pool_pages=7), 'pool_pages=7: one sequence .* needs 8'),
        (dict(steps=((60, 8),)), 'multiple of 64'),
        (dict(steps=((0, 8),)), 'tokens must be'),
        (dict(steps=((64, 0),)), 'tiles at least 1'),
    ],
)
def test_bad_sizes(options, message):
  with pytest.raises(ValueError, match=message):
    engine_lib.Engine(CFG, 0, **dict(max_sequences=8) | options)


@pytest.mark.parametrize(
    'options', [dict(temperature=-1), dict(top_k=-1), dict(top_p=0.0)]
)
def test_bad_sampling(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    engine_lib.Sampling(**options)


# --- a draw depends on the sequence only ---


def test_alone_and_in_company(engine, scripts, played):
  for version, script in enumerate(scripts):
    engine.load_params(engine._weights, version)
    alone = samples.play(engine, [dataclasses.replace(script, wait=0)])
    name = script.rollout_id
    samples.assert_same(alone, {name: played[name]})


@pytest.mark.parametrize('steps', [((192, 40),), ((64, 8),)])
def test_the_shape_of_the_steps_is_free(weights, scripts, played, steps):
  other = samples.make_engine(CFG, weights_=weights, steps=steps)
  samples.assert_same(samples.play(other, scripts), played)


def test_slots_and_pages_are_free(engine, scripts, played):
  for slot in range(5):  # pages in another order, and slot 2 stays taken
    engine.insert(100 + slot, [slot + 1] * 40)
  for _ in range(9):
    engine.generate()
  for slot in (3, 0, 4, 1):
    engine.release(slot)
  engine.pause(2)
  again = samples.play(engine, scripts[::-1])
  samples.assert_same(again, played)


def test_streams_of_rollouts_are_distinct(engine):
  tokens = {}
  for name in (0, 1, 2, (1 << 31) - 1):
    slot = engine.insert(name, PROMPT)
    tokens[name] = tuple(t for t, _ in draw(engine, slot, 20))
    engine.release(slot)
  assert len(set(tokens.values())) == 4


def test_another_seed_draws_other_tokens(weights, scripts, played):
  other = samples.make_engine(CFG, 4, weights_=weights, steps=((64, 8),))
  slot = other.insert(0, scripts[0].prompt)
  start = len(scripts[0].prompt)
  count = min(scripts[0].draws[0], 20)
  drawn = [t for t, _ in draw(other, slot, count)]
  expected = played[0].tokens[start : start + count].tolist()
  assert count > 5 and drawn != expected


# --- forced tokens ---


def forced(script, item, count=None):
  drawn = item.tokens[item.sampled].tolist()[:count]
  return dataclasses.replace(script, forced=tuple(drawn))


def test_forced_tokens_have_the_bits_of_drawn_ones(weights, scripts, played):
  other = samples.make_engine(CFG, 4, weights_=weights, steps=((192, 40),))
  again = [forced(s, played[s.rollout_id]) for s in scripts[::-1]]
  samples.assert_same(samples.play(other, again), played)


def test_drawing_goes_on_after_forced_tokens(engine, scripts, played):
  again = [forced(s, played[s.rollout_id], 3) for s in scripts]
  samples.assert_same(samples.play(engine, again), played)


def test_log_probs_of_tokens_that_nobody_would_draw(engine, weights):
  z = samples.logits(CFG, weights, PROMPT, 1.0)[-1]
  worst = int(z.argmin())
  slot = engine.insert(0, PROMPT)
  engine.force(slot, [worst])
  other = engine.insert(1, PROMPT)
  one, two = engine.generate()
  assert (one.slot, one.token) == (slot, worst) and two.slot == other
  expected = np.asarray(jax.nn.log_softmax(z))[worst]
  np.testing.assert_allclose(one.logp, expected, atol=2e-5)
  assert two.token != worst


def test_forced_tokens_are_in_the_vocabulary(engine):
  slot = engine.insert(0, PROMPT)
  for token in (-1, 64):
    with pytest.raises(ValueError, match=f'token {token}: allowed are 0..63'):
      engine.force(slot, [3, token])
  (drawn,) = engine.generate()
  assert drawn.token != 3  # nothing of a refused list is kept


def test_the_likeliest_tokens(weights, scripts, played):
  engine = samples.make_engine(CFG, weights_=weights, likeliest=3)
  again = samples.play(engine, scripts[:4])
  samples.assert_same(
      again, {s.rollout_id: played[s.rollout_id] for s in scripts[:4]}
  )
  for item in again.values():
    z = samples.logits(CFG, weights, item.tokens, 1.0)
    places = np.flatnonzero(item.sampled)
    expected = np.argsort(-z[places - 1], -1)[:, :3]
    np.testing.assert_array_equal(item.likeliest[places], expected)


# --- prefixes ---


def group(prompt=PROMPT, draws=(9, 9), first=0):
  return [
      samples.Script(first + i, prompt, draws, ((5, 6, 7),)) for i in range(4)
  ]


def test_a_group_shares_its_prompt(engine):
  without = {}
  for version, script in enumerate(group()):
    engine.load_params(engine._weights, 10 + version)
    without |= samples.play(engine, [script])
  assert engine.pages.hits == 0
  engine.load_params(engine._weights, 0)
  shared = {}
  for script in group():
    shared |= samples.play(engine, [script])
  samples.assert_same(shared, without)
  assert engine.pages.hits == 6  # two full pages, three times
  engine.load_params(engine._weights, 1)
  before, hits = engine.counts['prefilled'], engine.pages.hits
  at_once = samples.play(engine, group())  # no page is full yet: no hits
  samples.assert_same(at_once, without)
  assert engine.pages.hits == hits
  assert engine.counts['prefilled'] - before == 4 * (21 + 4)


def test_a_conversation_goes_on_from_its_pages(engine):
  """Turns that are known, drawn tokens among them, are not read again."""
  (script,) = group()[:1]
  whole = samples.play(engine, [script])[0]
  for cut in (30, 33, 40):  # in a turn, after it, at the end of a page
    hits, read = engine.pages.hits, engine.counts['prefilled']
    slot = engine.insert(0, whole.tokens[:cut].tolist())
    assert engine.pages.hits - hits == (cut - 1) // CFG.page
    draws = draw(engine, slot, 42 - cut if cut > 32 else 1)
    if cut != 30:
      assert [t for t, _ in draws] == whole.tokens[cut:].tolist()
      np.testing.assert_array_equal([p for _, p in draws], whole.logp[cut:])
    _, routes = engine.release(slot)
    np.testing.assert_array_equal(routes[: cut - 1], whole.routes[: cut - 1])
    assert engine.counts['prefilled'] - read <= CFG.page
  assert engine.pages.hits == 3 + 4 + 4


def test_pages_of_other_weights_are_misses(engine, weights):
  """Case 9."""
  samples.play(engine, group()[:1])
  other = samples.weights(CFG, 1)
  engine.load_params(other, 1)
  second = samples.play(engine, group()[:1])
  assert engine.pages.hits == 0
  fresh = samples.make_engine(CFG, weights_=other, version=1)
  samples.assert_same(second, samples.play(fresh, group()[:1]))
  engine.load_params(weights, 2)
  samples.play(engine, group()[:1])
  assert engine.pages.hits == 0
  engine.load_params(weights, 2)  # the same again: pages stay
  samples.play(engine, group()[:1])
  assert engine.pages.hits == 2


def test_a_version_that_holds_other_weights_is_another_one(engine, weights):
  """Case 9: a number that is given twice does not bring old pages back."""
  (script,) = group()[:1]
  first = samples.play(engine, [script])
  norm = np.array(weights['final_norm'])
  norm[-1:].view(np.int32)[0] ^= 1
  wrong = weights | {'final_norm': jax.numpy.asarray(norm)}
  hashes = [engine.weights_hash]
  for other in (wrong, weights):
    engine.load_params(other, 0)
    hashes.append(engine.weights_hash)
    again = samples.play(engine, [script])
    assert engine.pages.hits == 0
    if other is weights:
      samples.assert_same(again, first)
  assert hashes[0] == hashes[2] != hashes[1]
  engine.load_params(samples.copy(weights), 0)  # equal content: pages stay
  samples.assert_same(samples.play(engine, [script]), first)
  assert engine.pages.hits == 2


def test_weights_change_between_sequences_only(engine, weights):
  slot = engine.insert(0, PROMPT)
  with pytest.raises(RuntimeError, match='while sequences are open'):
    engine.load_params(weights, 1)
  assert engine.version == 0
  draw(engine, slot, 1)
  engine.release(slot)
  engine.load_params(weights, 1)
  assert engine.version == 1


def test_the_tail_of_an_idle_sequence_is_evicted_first(engine):
  slot = engine.insert(0, [9] * 63)
  draw(engine, slot, 1)
  engine.release(slot)
  while engine.pages.available > 7:
    engine.pages.allocate()
  for left in range(7, 0, -1):
    slot = engine.insert(0, [9] * 63)
    assert len(engine._sequence(slot).pages) == left
    engine.release(slot)
    engine.pages.allocate()


# --- steps ---


def test_a_long_prompt_is_read_in_chunks(engine):
  prompt = [*range(60)]
  for i in range(5):
    engine.insert(i, prompt)
  drawn, steps = {}, 0
  while len(drawn) < 5:
    for d in engine.generate():
      drawn.setdefault(d.slot, (d.token, d.logp))
    steps += 1
    if steps == 1:
      assert len(drawn) == 3  # 3 x 60 + 12 tokens fill the larger step
  assert steps == 2
  for slot in range(5):
    engine.release(slot)
  engine.load_params(engine._weights, 1)
  for i in range(5):
    slot = engine.insert(i, prompt)
    assert draw(engine, slot, 1) == [drawn[i]]
    engine.release(slot)


def test_decoding_goes_on_beside_a_long_prompt(engine):
  slots = [engine.insert(i, PROMPT[:3]) for i in range(3)]
  engine.generate()
  for i in range(2):
    engine.insert(10 + i, range(63))
  assert {d.slot for d in engine.generate()} >= set(slots)


def test_reserved_pages_never_run_out(weights):
  """Every open sequence may fill its context, whatever the others do."""
  engine = samples.make_engine(CFG, weights_=weights)
  opened = []
  while engine.can_insert():
    opened.append(engine.insert(len(opened), [len(opened)] * 3))
  assert len(opened) == 5  # 44 pages hold 5 contexts of 8, not the 8 slots
  with pytest.raises(RuntimeError, match='no free slot or too few'):
    engine.insert(9, PROMPT)
  while any(engine.length(s) < 64 for s in opened):
    engine.generate()
    for slot in opened:
      if engine.length(slot) == 64:
        engine.pause(slot)
  assert engine.pages.in_use == engine.pages.peak == 40
  engine.release(opened[1])
  assert engine.can_insert()


def test_all_pages_are_given_back(engine, scripts):
  for version in range(3):
    engine.load_params(engine._weights, version)
    samples.play(engine, scripts)
    assert engine.pages.in_use == 0
    assert engine.pages.available == 44
  assert engine.can_insert()


def test_no_compilation_in_steady_state(engine, scripts, played):
  compiled = []
  listen = lambda name, *_, **__: compiled.append(name)
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    size = engine._step._cache_size()
    samples.play(engine, scripts)
    engine.greedy = True
    samples.play(engine, scripts[:3])
    engine.load_params(samples.copy(engine._weights), 5)
    compiled.clear()
    samples.play(engine, samples.traffic(CFG, 5, seed=8))
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert engine._step._cache_size() == size
  assert not [name for name in compiled if 'compil' in name]


# --- what is recorded ---


def test_every_token_but_the_last_has_routes(played):
  for item in played.values():
    assert (item.routes[:-1] >= 0).all()
    assert (item.routes[:-1] < CFG.experts).all()
    assert (item.routes[-1] == -1).all()
    pairs = np.sort(item.routes[:-1], -1)
    assert (pairs[..., 0] != pairs[..., 1]).all()  # two distinct experts


def test_an_unread_sequence_has_no_routes(engine):
  slot = engine.insert(0, PROMPT)
  _, routes = engine.release(slot)
  assert routes.shape == (21, 4, 2) and (routes == -1).all()


def test_logps_are_those_of_the_plain_forward(weights, scripts, played):
  script = max(scripts, key=lambda s: sum(s.draws))
  item = played[script.rollout_id]
  z = samples.logits(CFG, weights, item.tokens, 1.0)
  logp = np.asarray(jax.nn.log_softmax(z[:-1]))
  places = np.flatnonzero(item.sampled)
  expected = logp[places - 1, item.tokens[places]]
  np.testing.assert_allclose(item.logp[places], expected, atol=2e-5)


def test_greedy_draws_the_likeliest_at_the_same_temperature(engine, weights):
  engine.greedy = True
  one = samples.play(engine, [samples.Script(1, PROMPT, (30,))])[1]
  two = samples.play(engine, [samples.Script(2, PROMPT, (30,))])[2]
  samples.assert_same({0: one}, {0: two})
  z = samples.logits(CFG, weights, one.tokens, 1.0)
  assert (z[20:-1].argmax(-1) == one.tokens[21:]).all()
  logp = np.asarray(jax.nn.log_softmax(z[20:-1])).max(-1)
  np.testing.assert_allclose(one.logp[21:], logp, atol=2e-5)


def test_a_narrowed_support_keeps_the_whole_log_prob(weights):
  """Case 3: top-k and top-p choose the token, not its recorded log-prob."""
  sampling = engine_lib.Sampling(temperature=0.7, top_k=6, top_p=0.8)
  engine = samples.make_engine(
      CFG, weights_=weights, sampling=sampling, steps=((64, 16),)
  )
  played = samples.play(
      engine, [samples.Script(i, PROMPT, (40,)) for i in range(5)]
  )
  ranks = []
  for item in played.values():
    z = samples.logits(CFG, weights, item.tokens, 0.7)[20:-1]
    logp = np.asarray(jax.nn.log_softmax(z))
    drawn = item.tokens[21:, None]
    own = np.take_along_axis(logp, drawn, -1)[:, 0]
    np.testing.assert_allclose(item.logp[21:], own, atol=3e-5)
    ranks.append((logp > own[:, None] + 1e-4).sum(-1))
    mass = np.exp(np.sort(logp, -1)[:, ::-1])
    ahead = np.cumsum(mass, -1) - mass
    before = np.take_along_axis(ahead, ranks[-1][:, None], -1)
    assert (before < 0.8 + 1e-4).all()
  ranks = np.concatenate(ranks)
  assert ranks.max() < 6
  assert len(set(ranks.tolist())) > 3  # and yet it is a draw
