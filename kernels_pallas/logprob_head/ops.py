"""Log-prob head: LM head, log-softmax, target log-prob, entropy and sampling.

Sampler and learner call the same `logprobs`; [tokens, V] is never built there,
and 'pallas' also draws without it unless top-k or top-p ask for all logits.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import numerics as nx
from kernels_pallas.logprob_head import pallas_gpu
from kernels_pallas.logprob_head import pallas_tpu
from kernels_pallas.logprob_head import reference
from kernels_pallas.logprob_head import xla

IMPLS = {
    'xla': xla,
    'pallas': {'tpu': pallas_tpu, 'gpu': pallas_gpu},
    'reference': reference,
}

# (forward, backward); what the forward returns besides log-probs and entropies
# is handed to the backward after x, w and targets.
_GRADIENTS: dict[Any, tuple[Callable, Callable]] = {
    xla: (xla.logprobs, xla.backward),
    pallas_tpu: (pallas_tpu.forward, pallas_tpu.backward),
    pallas_gpu: (pallas_gpu.forward, pallas_gpu.backward),
    reference: (reference.logprobs, xla.backward),
}
# Those that take a support; the kernels have none yet.
SUPPORT_IMPLS = {'xla': xla, 'reference': reference}
# Those that draw from the whole vocabulary without [T, V].
_DRAWS: dict[Any, Callable] = {
    pallas_tpu: pallas_tpu.draw,
    pallas_gpu: pallas_gpu.draw,
}


def logprobs(
    x_TD,
    w_DV,
    targets_T,
    *,
    support_Tk=None,
    temperature: float,
    numerics,
    impl='auto',
):
  """log p_t = z_t[y_t] - log Σ_v exp z_t[v], z = x W / temperature.

  The log-softmax runs online over vocabulary tiles. Source: arXiv:1805.02867
  alg. 3. With a support S_t the sum runs over v in S_t alone: the distribution
  that top-k and top-p left, also under other weights than those that chose it.
  Source: 'keep sampling mask', arXiv:2512.02556 section 3.1.

  Args:
    x_TD: [T, D] final hidden rows, T a multiple of ROW_TILE.
    w_DV: [D, V] head.
    targets_T: int32 [T], in 0..V-1.
    support_Tk: int32 [T, k], the distinct tokens of S_t in any order, filled up
      with -1; a row of -1 alone is the whole vocabulary.
    temperature: > 0.
    numerics: rounding and summation rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'; with a support not 'pallas'.

  Returns:
    float32 log-probs [T], -inf outside the support, and float32 entropies [T]
    in nats.

  Raises:
    ValueError: on a temperature that is not positive or shapes that do not fit.
  """
  if not temperature > 0:
    raise ValueError(f'temperature={temperature}: must be above 0')
  _check(x_TD, w_DV, targets_T, 'targets_T', numerics)
  if support_Tk is not None:
    if support_Tk.ndim != 2 or support_Tk.shape[0] != x_TD.shape[0]:
      raise ValueError(
          f'support_Tk {support_Tk.shape}: expected [{x_TD.shape[0]}, k]'
      )
    made = nx.choose(impl, SUPPORT_IMPLS, 'logprobs with a support')
    return _supported(
        x_TD, w_DV, targets_T, support_Tk, float(temperature), numerics, made
    )
  made = nx.choose(impl, IMPLS, 'logprobs')
  return _logprobs(x_TD, w_DV, targets_T, float(temperature), numerics, made)


def _check(x, w, rest, name, numerics):
  if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
    raise ValueError(
        f'x_TD {x.shape} and w_DV {w.shape}: expected [T, D] and [D, V]'
    )
  if rest.shape != x.shape[:1]:
    raise ValueError(f'{name} {rest.shape}: x_TD needs {x.shape[:1]}')
  if numerics.exact and x.shape[0] % nx.ROW_TILE:
    raise ValueError(
        f'x_TD {x.shape}: {x.shape[0]} rows, a multiple of {nx.ROW_TILE} is'
        ' needed'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _logprobs(x, w, targets, temperature, numerics, made):
  return made.logprobs(x, w, targets, temperature, numerics)


def _forward(x, w, targets, temperature, numerics, made):
  fun = _GRADIENTS[made][0]
  logp, entropy, *rest = fun(x, w, targets, temperature, numerics)
  return (logp, entropy), (x, w, targets, *rest)


def _backward(temperature, numerics, made, saved, grads):
  x, w = saved[:2]
  fun = _GRADIENTS[made][1]
  dx, dw = fun(*saved, *grads, temperature, numerics)
  return dx.astype(x.dtype), dw.astype(w.dtype), None


_logprobs.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _supported(x, w, targets, support, temperature, numerics, made):
  return made.logprobs(x, w, targets, temperature, numerics, support)


def _supported_forward(x, w, targets, support, temperature, numerics, made):
  out = made.logprobs(x, w, targets, temperature, numerics, support)
  return out, (x, w, targets, support)


def _supported_backward(temperature, numerics, made, saved, grads):
  del made
  x, w, targets, support = saved
  g_logp, g_entropy = grads
  dx, dw = xla.backward(
      x, w, targets, g_logp, g_entropy, temperature, numerics, support
  )
  return dx.astype(x.dtype), dw.astype(w.dtype), None, None


_supported.defvjp(_supported_forward, _supported_backward)


def sample(
    x_TD,
    w_DV,
    keys_T,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    noise=1.0,
    forced_T=None,
    keep_support: bool = False,
    numerics,
    impl='auto',
):
  """Draws y_t = argmax_v (z_t[v] + g_t[v]), g Gumbel noise from the row's key.

  Source: Gumbel-max, arXiv:1611.01144 eq. 1. The recorded log-prob is that of
  the unfiltered distribution at the same temperature, on both sides, also when
  top-k or top-p narrow the support that is drawn from; with `keep_support` it
  is that of the narrowed one, and the support is returned for the other side.

  Args:
    x_TD: [T, D] final hidden rows, T a multiple of ROW_TILE.
    w_DV: [D, V] head.
    keys_T: PRNG keys [T]; a row's draw depends on its key and its logits only.
      'pallas' makes the noise itself, from threefry2x32 keys.
    temperature: >= 0; 0 is greedy, its log-prob is taken at temperature 1.
    top_k: draw from the k most likely tokens; 0 for all.
    top_p: draw from the smallest set whose mass reaches top_p, after top-k and
      renormalised; in (0, 1].
    noise: factor of the noise, a number or a traced scalar; 0 draws greedily at
      the same temperature, in the same program.
    forced_T: int32 [T], tokens to take instead of drawing, -1 to draw; their
      log-probs come from the same program; that of a token outside the support
      is among all tokens. None draws them all.
    keep_support: record the support; needs a top_k, which bounds its size.
    numerics: rounding and summation rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    tokens int32 [T] and their float32 log-probs [T]; with `keep_support` also
    the support int32 [T, k] for `logprobs`, k = min(top_k, V), likeliest first.

  Raises:
    ValueError: on a temperature, top_k or top_p outside its range, or shapes
      that do not fit.
  """
  check_sampling(temperature, top_k, top_p, keep_support)
  _check(x_TD, w_DV, keys_T, 'keys_T', numerics)
  made = nx.choose(impl, IMPLS, 'sample')
  divisor = temperature if temperature > 0 else 1.0
  support = None
  if made in _DRAWS and not top_k and top_p == 1:
    tokens = _DRAWS[made](
        x_TD, w_DV, keys_T, divisor, noise, temperature == 0, numerics
    )
  else:
    z = made.logits(x_TD, w_DV, divisor, numerics)
    if top_k or top_p < 1:
      kept = _support(z, top_k, top_p, numerics)
      if keep_support:
        support = _ids(z, kept, top_k)
      z = jnp.where(kept, z, -jnp.inf)
    if temperature > 0:
      gumbel = jax.vmap(lambda k: jax.random.gumbel(k, z.shape[1:], nx.F32))
      z = z + numerics.keep(gumbel(keys_T) * noise)
    tokens = jnp.argmax(z, -1).astype(jnp.int32)
  if forced_T is not None:
    tokens = jnp.where(forced_T < 0, tokens, forced_T)
    if support is not None:  # what could not be drawn is one of all tokens
      known = (support == tokens[:, None]).any(-1, keepdims=True)
      support = jnp.where(known, support, -1)
  logp, _ = logprobs(
      x_TD,
      w_DV,
      tokens,
      support_Tk=support,
      temperature=divisor,
      numerics=numerics,
      impl=impl,
  )
  return (tokens, logp, support) if keep_support else (tokens, logp)


def likeliest(x_TD, w_DV, k: int, *, numerics, impl='auto'):
  """Returns the k likeliest tokens of each row, int32 [T, k], best first.

  For diagnostics: a row tile of logits is built at a time.

  Args:
    x_TD: [T, D] final hidden rows, T a multiple of ROW_TILE.
    w_DV: [D, V] head.
    k: in 0..V; of equal logits the lower token comes first.
    numerics: rounding and summation rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Raises:
    ValueError: on a k outside its range, or shapes that do not fit.
  """
  _check(x_TD, w_DV, x_TD[:, 0], 'rows', numerics)
  if not 0 <= k <= w_DV.shape[1]:
    raise ValueError(f'k={k}: allowed are 0..{w_DV.shape[1]}')
  if not k:
    return jnp.zeros((x_TD.shape[0], 0), jnp.int32)
  made = nx.choose(impl, IMPLS, 'likeliest')

  def tile(rows):
    return lax.top_k(made.logits(rows, w_DV, 1.0, numerics), k)[1]

  return lax.map(tile, x_TD.reshape(-1, nx.ROW_TILE, x_TD.shape[1])).reshape(
      -1, k
  )


def check_sampling(
    temperature: float, top_k: int, top_p: float, keep_support: bool = False
) -> None:
  """Raises ValueError if a sampling option is outside its range."""
  if not (temperature == 0 or 1e-3 <= temperature <= 1e3):
    raise ValueError(
        f'temperature={temperature}: must be 0 (greedy) or in [0.001, 1000]'
    )
  if not 0 <= top_k < 1 << 31:
    raise ValueError(f'top_k={top_k}: must be 0 (all) or above, below 2^31')
  if not 0 < top_p <= 1:
    raise ValueError(f'top_p={top_p}: must be in (0, 1]')
  if keep_support and not top_k:
    raise ValueError(
        f'keep_support=True with top_k={top_k}: the support is kept as top_k'
        ' tokens, so a top_k of 1 or above is needed'
    )


def _ids(z_TV, kept_TV, top_k):
  """Returns the kept tokens int32 [T, k], likeliest first, -1 for none."""
  order = jnp.argsort(-z_TV, -1, stable=True)[:, :top_k].astype(jnp.int32)
  return jnp.where(jnp.take_along_axis(kept_TV, order, -1), order, -1)


def _support(z_TV, top_k, top_p, numerics):
  order = jnp.argsort(-z_TV, -1, stable=True)
  rank = jnp.argsort(order, -1, stable=True)
  keep = rank < (top_k or z_TV.shape[-1])
  if top_p < 1:
    z = jnp.take_along_axis(z_TV, order, -1)
    p = numerics.keep(jnp.exp(z - z[:, :1]))
    if top_k:  # the mass of the nucleus is counted among the top k
      p = jnp.where(jnp.arange(p.shape[1]) < top_k, p, 0)
    p = numerics.keep(p * (1 / numerics.tree_sum(p))[:, None])
    ahead = jnp.take_along_axis(_mass_ahead(p, numerics), rank, -1)
    keep &= ahead < top_p
  return keep | (rank == 0)


def _mass_ahead(p_TV, numerics):
  """Σ of the entries left of each one, by doubling strides of plain adds."""
  if not numerics.exact:
    return jnp.cumsum(p_TV, -1) - p_TV
  shift = lambda x, by: jnp.pad(x[:, :-by], [(0, 0), (by, 0)])
  total, stride = shift(p_TV, 1), 1
  while stride < p_TV.shape[1]:
    total = total + shift(total, stride)
    stride *= 2
  return total
