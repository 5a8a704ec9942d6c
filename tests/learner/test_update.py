import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.learner import inputs as inputs_lib
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import pack as pack_lib
from agentic_rl.learner import update
from agentic_rl.policy import model
from kernels_pallas import numerics as nx
from tests.kernels import samples as kernel_samples
from tests.learner import plain
from tests.rollout import samples

CFG = samples.config(layers=2, heads=4, kv_heads=2, head_width=8)
TEMPERATURE = 0.8


@pytest.fixture(scope='module')
def weights():
  return samples.weights(CFG)


def example(length, seed):
  """A sequence with random actions; its log-probs are near any policy's."""
  rng = np.random.default_rng([seed, length])
  sampled = rng.random(length) < 0.4
  sampled[-1], sampled[0] = True, False
  return pack_lib.Example(
      tokens=rng.integers(0, CFG.vocab, length).astype(np.int32),
      weights=sampled.astype(np.float32),
      advantages=np.where(sampled, rng.normal(size=length), 0).astype(
          np.float32
      ),
      logp_behavior=np.where(sampled, -4.0, 0).astype(np.float32),
      sampled=sampled,
  )


EXAMPLES = [example(n, i) for i, n in enumerate((64, 37, 9, 20, 50, 2, 16))]
# Ratios are far from 1 here: the bounds must not bind.
FREE = dict(
    name='ppo_clip',
    options=(('clip_high', 1e9), ('clip_low', -1e9)),
    temperature=TEMPERATURE,
)


def make(rows=2, row_tokens=64, cfg=CFG, **loss):
  optimizer = optimizer_lib.make('adam', learning_rate=1e-3, steps=10)
  return update.Learner(
      cfg,
      update.LossConfig(**FREE | loss),
      optimizer,
      rows=rows,
      row_tokens=row_tokens,
  )


@functools.cache
def learner(rows=2, row_tokens=64, **loss):
  return make(rows, row_tokens, **loss)


def gradient(one, weights, batch, reference=None):
  """Returns the sums of a batch: gradients and counts."""
  sums = update.Sums.zeros(one.cfg, weights)
  scale = np.float32(1 / batch.weights_BT.sum())
  for part in pack_lib.microbatches(batch, one.rows):
    sums = one._accumulate(
        weights, reference, sums, inputs_lib.flatten(part), scale
    )
  return sums


@functools.cache
def _logprob_program(cfg):
  fun = functools.partial(
      update.policy_logprobs, cfg=cfg, temperature=TEMPERATURE
  )
  return nx.jit(lambda w, b: fun(w, b), exact=cfg.exact)


def logprobs(weights, batch, rows, cfg=CFG):
  """Returns {(sequence, position of the target): log-prob} of drawn tokens."""
  out = {}
  for part in pack_lib.microbatches(batch, rows):
    inputs = inputs_lib.flatten(part)
    logp = np.asarray(_logprob_program(cfg)(weights, inputs)[0])
    places = inputs['rows'][inputs['rows'] < inputs['tokens'].size]
    for place, value in zip(places, logp):
      at = np.unravel_index(place, part.tokens_BT.shape)
      key = int(part.segments_BT[at]), int(part.positions_BT[at])
      out[key] = value.view(np.int32)
  return out


def assert_close(a, b, atol=2e-6):
  for (path, x), y in zip(
      jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4, err_msg=name)


@pytest.fixture(scope='module')
def base(weights):
  """The sums of the examples."""
  one = learner()
  return gradient(one, weights, one.pack(EXAMPLES))


def test_the_gradient_is_that_of_plain_single_sequences(weights):
  """Case 6 too: each router has a gradient, its bias has none."""
  examples = EXAMPLES[1:3]
  total = sum(e.weights[1:].sum() for e in examples)
  exact = jax.jit(
      jax.value_and_grad(
          lambda w, entropy: plain.loss(
              w, examples, CFG, temperature=TEMPERATURE, entropy=entropy
          )
      )
  )
  for entropy in (0.0, 0.03):
    one = learner(entropy=entropy)
    sums = gradient(one, weights, one.pack(examples))
    value, grads = exact(weights, entropy)
    assert_close(sums.grads, grads, atol=1e-5)
    mean = float(sums.scalars['loss']) / total
    mean -= entropy * float(sums.scalars['entropy']) / total
    np.testing.assert_allclose(mean, value, rtol=1e-4)
    for path, leaf in jax.tree.leaves_with_path(sums.grads):
      size = float(jnp.abs(leaf).max())
      name = jax.tree_util.keystr(path)
      assert (size == 0) == model.is_balance(path), (name, size)


@pytest.mark.parametrize(
    'order, rows, row_tokens',
    [
        ((6, 5, 4, 3, 2, 1, 0), 2, 64),
        ((3, 0, 6, 1, 5, 2, 4), 2, 128),
    ],
)
def test_packing_and_microbatches_change_nothing(
    weights, base, order, rows, row_tokens
):
  """Cases 1 and 2: equal bits of log-probs; gradients up to rounding."""
  expected = logprobs(weights, learner().pack(EXAMPLES), 2)
  assert len(expected) == sum(e.sampled[1:].sum() for e in EXAMPLES)
  one = learner(rows, row_tokens)
  batch = one.pack([EXAMPLES[i] for i in order])
  found = logprobs(weights, batch, rows)
  assert {(order[s], t): v for (s, t), v in found.items()} == expected
  sums = gradient(one, weights, batch)
  assert_close(sums.grads, base.grads)
  for name, value in base.scalars.items():
    np.testing.assert_allclose(sums.scalars[name], value, rtol=1e-5)
  np.testing.assert_array_equal(sums.load_LE, base.load_LE)


def test_what_padding_holds_changes_nothing(weights, base):
  """Case 11."""
  one = learner()
  batch = one.pack(EXAMPLES)
  padding = batch.segments_BT < 0
  assert padding.sum() > 20
  rng = np.random.default_rng(0)
  for name in ('tokens_BT', 'targets_BT'):
    value = getattr(batch, name)
    value[padding] = rng.integers(0, CFG.vocab, padding.sum())
  expected = logprobs(weights, learner().pack(EXAMPLES), 2)
  assert logprobs(weights, batch, 2) == expected
  sums = gradient(one, weights, batch)
  assert_close(sums.grads, base.grads)
  np.testing.assert_array_equal(sums.load_LE, base.load_LE)


def test_only_sampled_tokens_have_a_gradient(weights, base):
  """Case 14: advantages and targets elsewhere do not matter."""
  one = learner()
  batch = one.pack(EXAMPLES)
  others = batch.weights_BT == 0
  batch.advantages_BT[others] = 1e3
  batch.logp_behavior_BT[others] = 7.0
  batch.targets_BT[others] = 1
  sums = gradient(one, weights, batch)
  assert_close(sums.grads, base.grads)
  assert sums.scalars['compared'] == batch.sampled_BT.sum()
  # And without the samples there is nothing to learn.
  quiet = [
      dataclasses.replace(e, advantages=0 * e.advantages) for e in EXAMPLES
  ]
  zero = gradient(one, weights, one.pack(quiet))
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(zero.grads))


def on_policy(weights, routes=None):
  """The examples with the policy's own log-probs."""
  found = logprobs(weights, learner().pack(EXAMPLES), 2)
  out = []
  for number, e in enumerate(EXAMPLES):
    logp = np.zeros(len(e.tokens), np.int32)
    for (segment, place), bits in found.items():
      if segment == number:
        logp[place + 1] = bits
    out.append(dataclasses.replace(e, logp_behavior=logp.view(np.float32)))
  return out


def test_on_policy_the_ratio_is_exactly_one(weights):
  one = learner()
  examples = on_policy(weights)
  own, state = samples.copy(weights), one.init(weights)
  new, state, stats = one.update(own, state, one.pack(examples))
  assert stats['mismatch/compared'] == sum(e.sampled.sum() for e in EXAMPLES)
  for name in ('unequal_bits', 'max_abs_dlogp', 'max_abs_ratio_dev'):
    assert stats[f'mismatch/{name}'] == 0
  assert stats['clip_share'] == 0
  total = sum(e.sampled.sum() for e in EXAMPLES)
  assert stats['trained_tokens'] == total
  assert stats['learner_tokens'] == sum(len(e.tokens) for e in EXAMPLES)
  mean = -sum(e.advantages.sum() for e in EXAMPLES) / total
  np.testing.assert_allclose(stats['loss'], mean, rtol=1e-5)
  # After the step the policy is another one, and that is seen.
  _, _, stats = one.update(new, state, one.pack(examples))
  assert stats['mismatch/unequal_bits'] > 0.9 * total
  assert stats['mismatch/max_abs_dlogp'] > 1e-3
  assert stats['mismatch/max_abs_ratio_dev'] > 1e-3


def test_a_gradient_is_looked_at_before_it_is_applied(weights):
  one = learner()
  own, batch = samples.copy(weights), one.pack(EXAMPLES)
  state = one.init(own)
  before = samples.copy((own, state))
  found = one.accumulate(own, batch)
  for a, b in zip(jax.tree.leaves((own, state)), jax.tree.leaves(before)):
    np.testing.assert_array_equal(a, b)  # nothing was given away or changed
  assert 'grad_norm' not in found.stats
  applied = one.apply(own, state, found)
  at_once = one.update(*before, batch)
  assert applied[2] == at_once[2] and applied[2]['grad_norm'] > 0
  assert found.stats.items() < applied[2].items()
  for a, b in zip(jax.tree.leaves(applied), jax.tree.leaves(at_once)):
    np.testing.assert_array_equal(a, b)
  changed = np.asarray(applied[0]['final_norm']) != weights['final_norm']
  assert changed.any()


def test_ratios_far_from_one_are_a_share(weights):
  """Case 2: the maximum and a share, not the mean alone."""
  one = learner()
  first, *_ = on_policy(weights)
  logp, drawn = first.logp_behavior.copy(), np.flatnonzero(first.sampled)
  logp[drawn[:3]] += np.float32([0.2, -0.2, 0.01])
  off = dataclasses.replace(first, logp_behavior=logp)
  stats = one.accumulate(weights, one.pack([off])).stats
  assert stats['mismatch/outside_share'] == pytest.approx(2 / len(drawn))
  np.testing.assert_allclose(stats['mismatch/max_abs_dlogp'], 0.2, rtol=1e-4)
  dev = np.exp(0.2) - 1
  np.testing.assert_allclose(
      stats['mismatch/max_abs_ratio_dev'], dev, rtol=1e-4
  )


@pytest.mark.parametrize('trained', [0.1, 0.9])
def test_memory_grows_with_the_tokens_that_need_a_log_prob(trained):
  """Case 12: no logits of all tokens, nor rows of those that need none."""
  cfg = dataclasses.replace(CFG, vocab=4096)
  one, count = make(32, 64, cfg=cfg), 32 * 64
  rng = np.random.default_rng(0)
  texts = [
      pack_lib.from_text(
          rng.integers(0, 9, 64).astype(np.int32),
          (rng.random(64) < trained).astype(np.float32),
      )
      for _ in range(32)
  ]
  inputs = inputs_lib.flatten(one.pack(texts))
  half = trained < 0.5
  assert inputs['rows'].size == (count // 2 if half else count)
  shapes = jax.eval_shape(lambda: model.init(cfg, 0))
  sums = jax.eval_shape(functools.partial(update.Sums.zeros, cfg), shapes)
  program = one._accumulate.trace(shapes, None, sums, inputs, np.float32(1))
  largest = max(kernel_samples.biggest(program.jaxpr))
  assert largest < count * cfg.vocab // 4


def test_one_wrong_bit_and_one_wrong_route_are_counted(weights):
  one = learner()
  examples = on_policy(weights)
  found = _logprob_program(CFG)(
      weights, inputs_lib.flatten(one.pack(examples[:1] * 2))
  )
  routes = np.asarray(found[2])[:, :64].transpose(1, 0, 2).astype(np.int16)
  first = examples[0]
  right = dataclasses.replace(first, routes=routes)
  sums = gradient(one, weights, one.pack([right]))
  assert sums.scalars['unequal'] == sums.scalars['flips'] == 0
  assert sums.scalars['routed'] == routes.size
  logp, wrong = first.logp_behavior.copy(), routes.copy()
  logp[-1:].view(np.int32)[0] ^= 1
  wrong[5] = wrong[5, :, ::-1]  # case 5: the order of the slots counts
  wrong[9:] = -1  # unknown, not expert 0
  broken = dataclasses.replace(first, routes=wrong, logp_behavior=logp)
  sums = gradient(one, weights, one.pack([broken]))
  assert sums.scalars['unequal'] == 1
  assert sums.scalars['flips'] == routes[5].size
  assert sums.scalars['routed'] == routes[:9].size


def test_divergence_from_the_reference(weights):
  one = make(reference_kl=0.1)
  batch = one.pack(EXAMPLES)
  same = gradient(one, weights, batch, samples.copy(weights))
  assert same.scalars['kl_reference'] == 0
  without = gradient(learner(), weights, batch)
  assert_close(same.grads, without.grads)  # at its minimum it has no slope
  other = gradient(one, weights, batch, samples.weights(CFG, 1))
  assert other.scalars['kl_reference'] > 1
  gaps = jax.tree.map(
      lambda a, b: float(jnp.abs(a - b).max()), other.grads, without.grads
  )
  assert max(jax.tree.leaves(gaps)) > 1e-3


def test_the_entropy_bonus_raises_entropy(weights):
  one = learner(entropy=0.03)
  quiet = [
      dataclasses.replace(e, advantages=0 * e.advantages) for e in EXAMPLES
  ]
  own, state, seen = samples.copy(weights), one.init(weights), []
  for _ in range(4):
    own, state, stats = one.update(own, state, one.pack(quiet))
    seen.append(stats['entropy'])
  assert seen == sorted(seen) and seen[-1] > seen[0] + 0.003
  assert seen[-1] < np.log(CFG.vocab)


def test_balance_moves_against_the_load(weights):
  one = make(balance=0.25)
  batch = one.pack(EXAMPLES)
  load = np.asarray(gradient(one, weights, batch).load_LE)
  tokens = sum(len(e.tokens) for e in EXAMPLES)
  assert (load.sum(-1) == tokens * CFG.topk_experts).all()  # no padding
  before = [np.asarray(w['balance']) for w in weights['pattern'].values()]
  new, _, stats = one.update(samples.copy(weights), one.init(weights), batch)
  for layer, (old, w) in enumerate(zip(before, new['pattern'].values())):
    expected = -0.25 * np.sign(load[layer] - load[layer].mean())
    np.testing.assert_allclose(w['balance'][0] - old[0], expected, atol=1e-6)
  np.testing.assert_allclose(
      stats['router/max_load'], (load / load.mean(-1, keepdims=True)).max()
  )
  still, _, _ = learner().update(
      samples.copy(weights), learner().init(weights), batch
  )
  for old, w in zip(before, still['pattern'].values()):
    np.testing.assert_array_equal(w['balance'], old)


def test_nothing_but_padding_gives_no_nan(weights):
  one = learner()
  inputs = inputs_lib.flatten(one.pack([]))
  sums = update.Sums.zeros(CFG, weights)
  sums = one._accumulate(weights, None, sums, inputs, np.float32(1))
  for leaf in jax.tree.leaves(sums):
    assert not np.any(leaf)  # nor NaN, which is true


def test_supervised_text_lowers_its_loss(weights):
  one = make(name='supervised', options=())
  text = [pack_lib.from_text(e.tokens, e.weights) for e in EXAMPLES]
  own, state, seen = samples.copy(weights), one.init(weights), []
  for _ in range(4):
    own, state, stats = one.update(own, state, one.pack(text))
    seen.append(stats['loss'])
  assert seen == sorted(seen, reverse=True) and seen[-1] < seen[0] - 0.01
  assert stats['mismatch/compared'] == stats['mismatch/max_abs_dlogp'] == 0


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(row_tokens=60), 'a multiple of page=8'),
        (dict(rows=1, row_tokens=72), 'whole tiles of 64'),
        (dict(rows=1 << 25), 'rows=33554432 of row_tokens=64: .* 2.31 tokens'),
        (dict(rows=2, row_tokens=32), 'row_tokens=32: .* max_context=64'),
        (dict(name='dpo'), "loss 'dpo': allowed are"),
        (dict(entropy=-1.0), 'entropy=-1.0: must be 0 or above'),
        (dict(reference_kl=-1.0), 'reference_kl'),
        (dict(balance=-1.0), 'balance'),
        (dict(options=(('clip', 1),)), "option 'clip' of loss 'ppo_clip'"),
    ],
)
def test_bad_options(options, message):
  with pytest.raises(ValueError, match=message):
    make(**options)


def test_bad_batches(weights):
  one = learner()
  quiet = [dataclasses.replace(e, weights=0 * e.weights) for e in EXAMPLES]
  for examples in (quiet, []):
    with pytest.raises(ValueError, match='no trained token'):
      one.update(weights, None, one.pack(examples))
  with pytest.raises(ValueError, match='weights of the reference'):
    make(reference_kl=1.0).update(weights, None, one.pack(EXAMPLES))


@pytest.mark.parametrize('name', ['loss', 'grad_norm'])
def test_divergence_is_an_error(name):
  stats = {'loss': 1.0, 'grad_norm': 2.0}
  update.check_finite(stats, 'step 3')
  with pytest.raises(update.DivergedError, match=f'step 3: {name} is nan'):
    update.check_finite(stats | {name: float('nan')}, 'step 3')
