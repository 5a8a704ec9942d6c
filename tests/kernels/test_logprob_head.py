"""Log-prob head: by hand, in gradient, in support, in memory, in bits."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import numerics as nx
from kernels_pallas.logprob_head import ops
from kernels_pallas.logprob_head import pallas_tpu
from kernels_pallas.logprob_head import xla
from tests.kernels import samples

F32 = samples.EXACT['float32']
DTYPES = samples.DTYPES
ROWS = nx.ROW_TILE
ALL = ['reference', 'xla', 'pallas']
FAST = ['xla', 'pallas']


def logprobs(dtype='float32', impl='xla', temperature=1.0):
  num = samples.EXACT[dtype]
  return lambda x, w, y: ops.logprobs(
      x, w, y, temperature=temperature, numerics=num, impl=impl
  )


def sampler(dtype='float32', **options):
  num = samples.EXACT[dtype]
  options = {'temperature': 1.0, **options}
  return nx.jit(lambda x, w, k: ops.sample(x, w, k, numerics=num, **options))


def keys(count, seed=0):
  return jax.random.split(jax.random.key(seed), count)


def rows_of(logits):
  """x and w such that every row of x w is `logits`."""
  width = len(logits)
  return np.ones((ROWS, 1), np.float32), np.reshape(logits, (1, width)).astype(
      np.float32
  )


@pytest.mark.parametrize('impl', ALL)
def test_by_hand(impl):
  x, w = rows_of([0, math.log(2), math.log(5)])
  logp, entropy = nx.jit(logprobs(impl=impl))(x, w, np.arange(ROWS) % 3)
  p = [1 / 8, 2 / 8, 5 / 8]
  np.testing.assert_allclose(logp[:3], np.log(p), rtol=1e-6)
  expected = -sum(v * math.log(v) for v in p)
  np.testing.assert_allclose(entropy, [expected] * ROWS, rtol=1e-6)
  # At temperature 1/2 the odds are squared.
  half = nx.jit(logprobs(impl=impl, temperature=0.5))
  logp, _ = half(x, w, np.arange(ROWS) % 3)
  np.testing.assert_allclose(
      logp[:3], np.log([1 / 30, 4 / 30, 25 / 30]), rtol=1e-6
  )


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    ('rows', 'vocab', 'temperature'),
    [(64, 7, 1.0), (256, 1100, 0.7), (192, 512, 1.3), (1088, 520, 1.0)],
)
def test_values_and_gradients(dtype, rows, vocab, temperature, impl):
  x = samples.normal(0, (rows, 24), dtype)
  w = samples.normal(1, (24, vocab), dtype, scale=0.3)
  y = np.random.default_rng(2).integers(0, vocab, rows)
  g = samples.normal(3, (rows,)), samples.normal(4, (rows,))

  def run(impl):
    fun = logprobs(dtype, impl, temperature)
    return samples.gradients(lambda x, w: fun(x, w, y), (x, w), g)

  # The derivative of the reference is plain differentiation of itself.
  def reference(x, w):
    return ops.reference.logprobs(x, w, y, temperature, samples.EXACT[dtype])

  values, grads = run(impl)
  expected, expected_grads = samples.gradients(reference, (x, w), g)
  for a, b in zip((*values, *grads), (*expected, *expected_grads)):
    samples.close(a, b)
  if vocab < 10:  # the dispatched reference has the same derivative
    for a, b in zip(run('reference')[1], grads):
      samples.close(a, b)


@pytest.mark.parametrize('impl', FAST)
def test_extreme_logits_are_finite(impl):
  x, w = rows_of([0, 3e4, -3e4, 80])
  logp, entropy = nx.jit(logprobs(impl=impl))(x, w, np.arange(ROWS) % 4)
  np.testing.assert_array_equal(logp[:4], [-3e4, 0, -6e4, 80 - 3e4])
  np.testing.assert_array_equal(entropy, np.zeros(ROWS))


@pytest.mark.parametrize(
    ('count', 'impl'), [(512, 'xla'), (320, 'xla'), (320, 'pallas')]
)
def test_tokens_by_vocabulary_is_never_built(count, impl):
  width, vocab = 8, 1100
  x, w = jnp.ones((count, width)), jnp.ones((width, vocab))
  y = jnp.zeros(count, jnp.int32)

  def loss(x, w):
    logp, entropy = logprobs(impl=impl)(x, w, y)
    return (logp + entropy).sum()

  gradient = jax.value_and_grad(loss, (0, 1))
  limit = max(xla.BACKWARD_ROWS, width) * vocab
  assert max(samples.biggest(jax.make_jaxpr(gradient)(x, w).jaxpr)) <= limit
  text = nx.jit(gradient).lower(x, w).compile().as_text()
  shapes = {
      tuple(map(int, s.split(',')))
      for s in re.findall(r'f32\[([\d,]+)\]', text)
  }
  assert (count, width) in shapes
  assert max(math.prod(s) for s in shapes) <= limit

  # The search can fail: a sampler that needs all logits does build it.
  def size(top_k=0):
    options = dict(temperature=1.0, top_k=top_k, numerics=F32, impl=impl)
    drawn = jax.make_jaxpr(lambda *a: ops.sample(*a, **options))
    return max(samples.biggest(drawn(x, w, keys(count)).jaxpr))

  assert size(top_k=3) == count * vocab
  assert (size() <= limit) == (impl == 'pallas')


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize('dtype', DTYPES)
def test_logprobs_are_pure(dtype, impl):
  x = samples.normal(0, (192, 24), dtype)
  w = samples.normal(1, (24, 600), dtype)
  y = np.random.default_rng(2).integers(0, 600, 192)
  fun = nx.jit(logprobs(dtype, impl, 0.9))
  full = fun(x, w, y)
  order = np.random.default_rng(3).permutation(192)
  for a, b in zip(fun(x[order], w, y[order]), full):
    samples.same_bits(a, np.asarray(b)[order])
  few = samples.nan_but((64, 24), {60: x[100]})
  target = samples.nan_but(64, {60: y[100]}, np.int32, 0)
  for a, b in zip(fun(few, w, target), full):
    samples.same_bits(np.asarray(a)[60], np.asarray(b)[100])

  def loss(x, w):
    out = logprobs(dtype, impl, 0.9)(x, w, y)
    return (out[0] + out[1]).sum(), out

  gradient = nx.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  for a, b in zip(gradient(x, w)[0][1], full):
    samples.same_bits(a, b)


def test_blocks_of_several_row_tiles_are_pure():
  """1,088 rows are two blocks, the last not full; 64 of them are one."""
  assert pallas_tpu.BLOCK_ROWS == 1024
  x, w = samples.normal(0, (1088, 24)), samples.normal(1, (24, 600))
  y = np.random.default_rng(2).integers(0, 600, 1088)
  fun = nx.jit(logprobs(impl='pallas'))
  full = fun(x, w, y)
  for rows in (slice(512, 576), slice(1024, 1088)):
    for a, b in zip(fun(x[rows], w, y[rows]), full):
      samples.same_bits(a, np.asarray(b)[rows])


# Sampling.


@pytest.mark.parametrize('impl', FAST)
def test_greedy(impl):
  x, w = samples.normal(0, (128, 24)), samples.normal(1, (24, 600))
  greedy = sampler(temperature=0.0, impl=impl)
  tokens, logp = greedy(x, w, keys(128))
  z = x.astype(np.float64) @ w
  np.testing.assert_array_equal(tokens, z.argmax(-1))
  samples.same_bits(logp, nx.jit(logprobs(impl=impl))(x, w, tokens)[0])
  x, w = rows_of([1, 2, 2, 0])
  assert set(np.asarray(greedy(x, w, keys(64))[0])) == {1}
  x, w = rows_of([1, 2] + [0] * 700 + [2])  # equals in two vocabulary tiles
  assert set(np.asarray(greedy(x, w, keys(64))[0])) == {1}


def test_all_draw_alike():
  """The noise of a kernel is that of `jax.random.gumbel`, place by place."""
  x, w = samples.normal(0, (192, 24)), samples.normal(1, (24, 1100), scale=0.3)
  key = keys(192)
  draws = [sampler(temperature=0.7, impl=impl)(x, w, key)[0] for impl in ALL]
  np.testing.assert_array_equal(draws[1], draws[0])
  np.testing.assert_array_equal(draws[2], draws[0])
  assert len(set(np.asarray(draws[0]))) > 100
  calm = sampler(temperature=0.7, impl='pallas', noise=0.0)(x, w, key)
  np.testing.assert_array_equal(calm[0], (x @ w).argmax(-1))


def test_noise_of_a_kernel_in_value():
  columns = np.arange(700, dtype=np.int32) + np.zeros((256, 1), np.int32)
  key = keys(256)
  noise = jax.jit(pallas_tpu._gumbel)(jax.random.key_data(key), columns)
  expected = jax.vmap(lambda k: jax.random.gumbel(k, (700,)))(key)
  np.testing.assert_allclose(noise, expected, rtol=1e-6, atol=1e-6)


def test_kernels_draw_with_one_kind_of_keys():
  x, w = rows_of([0, 1])
  key = jax.random.split(jax.random.key(0, impl='rbg'), ROWS)
  with pytest.raises(ValueError, match='keys_T of rbg.*threefry2x32 keys'):
    sampler(impl='pallas')(x, w, key)


def test_kernels_take_one_dtype_and_a_width_that_fits():
  y = jnp.zeros(ROWS, jnp.int32)
  run = logprobs(impl='pallas')
  with pytest.raises(ValueError, match='x_TD float32 and w_DV bfloat16'):
    run(jnp.zeros((ROWS, 8)), jnp.zeros((8, 9), jnp.bfloat16), y)
  with pytest.raises(ValueError, match='takes a width of at most 4096'):
    run(jnp.zeros((ROWS, 4224)), jnp.zeros((4224, 9)), y)


def support(top_k, top_p):
  return nx.jit(lambda z: ops._support(z, top_k, top_p, F32))


P = np.asarray([0.05, 0.4, 0.15, 0.3, 0.1])


@pytest.mark.parametrize(
    ('top_k', 'top_p', 'expected'),
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (2, 1.0, [1, 3]),
        (1, 1.0, [1]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.39, [1]),
        (0, 0.6, [1, 3]),
        (0, 0.72, [1, 2, 3]),
        (0, 1e-9, [1]),
        (2, 0.9, [1, 3]),
        (2, 0.55, [1]),  # 0.4 of 0.7 is 0.571
        (3, 0.8, [1, 3]),  # 0.7 of 0.85 is 0.824
        (4, 0.6, [1, 3]),
    ],
)
def test_support(top_k, top_p, expected):
  kept = support(top_k, top_p)(np.log([P, P[::-1]]).astype(np.float32))
  assert np.flatnonzero(kept[0]).tolist() == expected
  np.testing.assert_array_equal(kept[1], kept[0][::-1])


@pytest.mark.parametrize('impl', FAST)
@pytest.mark.parametrize(
    ('top_k', 'top_p', 'support'),
    [(0, 1.0, [0, 1, 2, 3, 4]), (4, 0.75, [1, 2, 3])],
)
def test_frequencies(top_k, top_p, support, impl):
  """Draws follow the softmax on the support (χ², its 0.999 quantile)."""
  x, w = rows_of(np.log(P))
  count = 1024
  x = np.ones((count, 1), np.float32)
  fun = sampler(top_k=top_k, top_p=top_p, impl=impl)
  tokens, logp = fun(x, w, keys(count, seed=top_k))
  seen = np.bincount(np.asarray(tokens), minlength=5)
  assert sorted(np.flatnonzero(seen)) == support
  expected = count * P[support] / P[support].sum()
  chi2 = ((seen[support] - expected) ** 2 / expected).sum()
  assert chi2 < {3: 13.8, 5: 18.5}[len(support)]
  # The recorded log-prob is that of the whole softmax.
  np.testing.assert_allclose(logp, np.log(P)[np.asarray(tokens)], rtol=1e-5)


def test_temperature_changes_the_frequencies():
  x, w = rows_of(np.log(P))
  x = np.ones((2048, 1), np.float32)
  tokens, logp = sampler(temperature=2.0)(x, w, keys(2048))
  flat = np.sqrt(P) / np.sqrt(P).sum()
  seen = np.bincount(np.asarray(tokens), minlength=5)
  assert ((seen - 2048 * flat) ** 2 / (2048 * flat)).sum() < 18.5
  np.testing.assert_allclose(logp, np.log(flat)[np.asarray(tokens)], rtol=1e-5)


def test_ties_keep_the_support_small():
  z = np.ones((3, 4), np.float32)
  for top_k, top_p, size in ((2, 1.0, 2), (0, 0.7, 3), (1, 0.7, 1)):
    kept = support(top_k, top_p)(z)
    np.testing.assert_array_equal(kept, [[i < size for i in range(4)]] * 3)


@pytest.mark.parametrize(
    ('dtype', 'options'),
    [
        ('float32', {}),
        ('float32', dict(top_p=0.8, top_k=50)),
        ('bfloat16', dict(top_p=0.8)),
        ('float32', dict(impl='pallas')),
        ('bfloat16', dict(impl='pallas')),
        ('bfloat16', dict(impl='pallas', top_p=0.8)),
    ],
)
def test_draws_are_pure(dtype, options):
  x = samples.normal(0, (192, 24), dtype)
  w = samples.normal(1, (24, 600), dtype, scale=0.3)
  key = keys(192)
  fun = sampler(dtype, temperature=0.8, **options)
  full = fun(x, w, key)
  order = np.random.default_rng(3).permutation(192)
  for a, b in zip(fun(x[order], w, key[order]), full):
    samples.same_bits(a, np.asarray(b)[order])
  few = samples.nan_but((64, 24), {60: x[100]})
  other = keys(64, seed=9).at[60].set(key[100])
  for a, b in zip(fun(few, w, other), full):
    samples.same_bits(np.asarray(a)[60], np.asarray(b)[100])
  impl = options.get('impl', 'xla')
  learner = nx.jit(logprobs(dtype, impl, 0.8))(x, w, full[0])[0]
  samples.same_bits(learner, full[1])
  assert (np.asarray(fun(x, w, keys(192, seed=9))[0]) != full[0]).any()


def test_mass_ahead_in_bits():
  p = np.exp(samples.normal(0, (5, 600)))
  p /= p.sum(-1, keepdims=True)
  fun = nx.jit(lambda p: ops._mass_ahead(p, F32))
  ahead = np.asarray(fun(p))
  exact = np.cumsum(np.asarray(p, np.float64), -1) - np.asarray(p)
  np.testing.assert_allclose(ahead, exact, atol=1e-6)
  assert not ahead[:, 0].any()
  alone = np.asarray(fun(p[3:4]))
  samples.same_bits(alone[0], ahead[3])


# Replay of the support.

TABLE = ['reference', 'xla']


def supported(impl='xla', temperature=1.0):
  return lambda x, w, y, s: ops.logprobs(
      x,
      w,
      y,
      support_Tk=s,
      temperature=temperature,
      numerics=F32,
      impl=impl,
  )


def supports(rows):
  """int32 [ROWS, 3]: the given rows again and again."""
  return np.resize(np.int32(rows), (ROWS, 3))


@pytest.mark.parametrize('impl', TABLE)
def test_support_by_hand(impl):
  """Odds 1 : 2 : 5 among some of them; -1 alone is everybody."""
  x, w = rows_of([0, math.log(2), math.log(5)])
  rows = [[0, 2, -1], [1, -1, -1], [-1, -1, -1], [2, 1, 0], [0, 1, -1]]
  targets = np.resize(np.int32([2, 1, 2, 2, 2]), ROWS)
  logp, entropy = nx.jit(supported(impl))(x, w, targets, supports(rows))
  expected = [math.log(5 / 6), 0, math.log(5 / 8), math.log(5 / 8), -math.inf]
  np.testing.assert_allclose(logp[:5], expected, rtol=1e-6, atol=1e-7)
  h = lambda *p: -sum(v * math.log(v) for v in p)
  whole = h(1 / 8, 2 / 8, 5 / 8)
  found = [h(1 / 6, 5 / 6), 0, whole, whole, h(1 / 3, 2 / 3)]
  np.testing.assert_allclose(entropy[:5], found, rtol=1e-5, atol=1e-6)


def test_support_gradients():
  """Against plain differentiation, and against finite differences."""
  count, width, vocab = 128, 12, 700  # two tiles of the vocabulary
  x, w = samples.normal(0, (count, width)), samples.normal(1, (width, vocab))
  rng = np.random.default_rng(2)
  s = rng.random((count, vocab)).argsort(-1)[:, :9].astype(np.int32)
  y = s[:, 4].copy()
  s[::2, 6:], s[::16] = -1, -1
  g = samples.normal(3, (count,)), samples.normal(4, (count,))
  run = lambda fun: samples.gradients(lambda x, w: fun(x, w, y, s), (x, w), g)

  def reference(x, w, y, s):
    return ops.reference.logprobs(x, w, y, 0.7, F32, s)

  (values, grads), (expected, slopes) = (
      run(supported(temperature=0.7)), run(reference)
  )  # fmt: skip
  for a, b in zip((*values, *grads), (*expected, *slopes)):
    samples.close(a, b)

  def exact(x):  # float64, one row, nothing of the above
    kept = s[1][s[1] >= 0]
    z = x @ np.float64(w[:, kept]) / 0.7
    logp = z - np.log(np.exp(z).sum())
    return logp[kept == y[1]][0] * g[0][1] - (np.exp(logp) @ logp) * g[1][1]

  row, step = np.float64(x[1]), 1e-6
  slope = [
      (exact(row + d) - exact(row - d)) / (2 * step)
      for d in step * np.eye(width)
  ]
  np.testing.assert_allclose(grads[0][1], slope, atol=1e-4)


@pytest.mark.parametrize('options', [dict(top_k=8), dict(top_k=20, top_p=0.7)])
def test_the_support_of_a_draw_is_replayed(options):
  """Case 3: one function on both sides, equal to the bit, in any company."""
  x = samples.normal(0, (192, 24))
  w = samples.normal(1, (24, 600), scale=0.3)
  fun = sampler(temperature=0.8, keep_support=True, **options)
  tokens, logp, kept = fun(x, w, keys(192))
  kept = np.asarray(kept)
  assert kept.shape == (192, options['top_k'])
  assert (kept == np.asarray(tokens)[:, None]).any(-1).all()
  again, _ = nx.jit(supported(temperature=0.8))(x, w, tokens, kept)
  samples.same_bits(again, logp)
  order = np.random.default_rng(3).permutation(192)
  for a, b in zip(fun(x[order], w, keys(192)[order]), (tokens, logp, kept)):
    samples.same_bits(a, np.asarray(b)[order])
  # The draws are those without a record, and the kept ones add up to one.
  plain = sampler(temperature=0.8, **options)(x, w, keys(192))
  np.testing.assert_array_equal(plain[0], tokens)
  z = np.float64(x) @ w / 0.8
  p = np.exp(z - z.max(-1, keepdims=True))
  mass = np.where(kept >= 0, np.take_along_axis(p, kept, -1), 0).sum(-1)
  chosen = np.take_along_axis(p, np.asarray(tokens)[:, None], -1)[:, 0]
  np.testing.assert_allclose(logp, np.log(chosen / mass), atol=1e-5)
  np.testing.assert_allclose(
      np.asarray(plain[1]) - logp, np.log(mass / p.sum(-1)), atol=1e-5
  )
  if 'top_p' in options:
    sizes = (kept >= 0).sum(-1)
    assert sizes.min() < sizes.max() and sizes.min() >= 1
  # Under other weights the support is the recorded one, not their own.
  other = samples.normal(5, (24, 600), scale=0.3)
  found, _ = nx.jit(supported(temperature=0.8))(x, other, tokens, kept)
  assert np.isfinite(found).all()
  own = sampler(temperature=0.8, keep_support=True, **options)
  theirs = np.asarray(own(x, other, keys(192))[2])
  lost = ~(theirs == np.asarray(tokens)[:, None]).any(-1)
  assert lost.mean() > 0.5  # without replay these ratios would be zero


def test_a_forced_token_outside_the_support():
  """It could not be drawn: its log-prob is among all tokens."""
  x, w = rows_of([0, math.log(2), math.log(5)])
  forced = np.resize(np.int32([0, 1, 2, -1]), ROWS)
  fun = sampler(keep_support=True, top_k=2, forced_T=forced)
  tokens, logp, kept = fun(x, w, keys(ROWS))
  np.testing.assert_array_equal(tokens[:3], [0, 1, 2])
  np.testing.assert_array_equal(kept[:3], [[-1, -1], [2, 1], [2, 1]])
  expected = [math.log(1 / 8), math.log(2 / 7), math.log(5 / 7)]
  np.testing.assert_allclose(logp[:3], expected, rtol=1e-6)
  assert set(np.asarray(tokens[3::4])) <= {1, 2}


def test_bad_supports():
  x, w = rows_of([0, 1])
  y = jnp.zeros(ROWS, jnp.int32)
  with pytest.raises(ValueError, match=r'support_Tk \(3, 2\): expected'):
    supported()(x, w, y, jnp.zeros((3, 2), jnp.int32))
  with pytest.raises(
      ValueError, match="impl='pallas' of logprobs with a support: allowed are"
  ):
    supported('pallas')(x, w, y, jnp.zeros((ROWS, 2), jnp.int32))
  with pytest.raises(ValueError, match='keep_support=True with top_k=0'):
    sampler(keep_support=True, top_p=0.5)(x, w, keys(ROWS))


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        (dict(top_p=0.0), r'top_p=0.0: must be in \(0, 1\]'),
        (dict(top_p=1.01), r'top_p=1.01: must be in \(0, 1\]'),
        (dict(top_p=-1), r'top_p=-1: must be in \(0, 1\]'),
        (dict(top_p=math.nan), r'top_p=nan'),
        (dict(temperature=-0.1), r'temperature=-0.1: must be 0 \(greedy\)'),
        (dict(temperature=math.nan), r'temperature=nan'),
        (dict(top_k=-1), r'top_k=-1: must be 0 \(all\) or above'),
        (dict(impl='fast'), "impl='fast' of sample: allowed"),
    ],
)
def test_bad_sampling_options(options, match):
  x, w = rows_of([0, 1])
  with pytest.raises(ValueError, match=match):
    sampler(**options)(x, w, keys(ROWS))


@pytest.mark.parametrize(
    ('x', 'w', 'y', 'match'),
    [
        ((64, 3), (4, 5), 64, r'x_TD \(64, 3\) and w_DV \(4, 5\)'),
        ((64, 4), (4,), 64, r'w_DV \(4,\): expected \[T, D\] and \[D, V\]'),
        ((64, 4), (4, 5), 63, r'targets_T \(63,\): x_TD needs \(64,\)'),
        ((60, 4), (4, 5), 60, r'x_TD \(60, 4\): 60 rows, a multiple of 64'),
    ],
)
def test_bad_shapes(x, w, y, match):
  x, w = jnp.zeros(x), jnp.zeros(w)
  with pytest.raises(ValueError, match=match):
    logprobs()(x, w, jnp.zeros(y, jnp.int32))
  with pytest.raises(ValueError, match=match.replace('targets_T', 'keys_T')):
    sampler()(x, w, keys(y))


@pytest.mark.parametrize('temperature', [0.0, -1.0, math.nan])
def test_bad_temperature(temperature):
  x, w = rows_of([0, 1])
  with pytest.raises(ValueError, match=f'temperature={temperature}: must be'):
    logprobs(temperature=temperature)(x, w, jnp.zeros(ROWS, jnp.int32))
