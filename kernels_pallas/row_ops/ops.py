"""Operations on single rows: normalisation, rotary positions, router.

They are one op so that an accelerator kernel can hold them whole: XLA may
fuse the same element-wise chain differently in two programs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import numerics as nx
from kernels_pallas.row_ops import pallas_gpu
from kernels_pallas.row_ops import pallas_tpu
from kernels_pallas.row_ops import reference
from kernels_pallas.row_ops import xla

IMPLS = {
    'xla': xla,
    'pallas': {'tpu': pallas_tpu, 'gpu': pallas_gpu},
    'reference': reference,
}


def rms_norm(x_TD, gain_D, *, numerics, eps: float = 1e-6, impl='auto'):
  """y = x / sqrt(mean(x²) + ε) · g. Source: arXiv:1910.07467 eq. 4.

  Args:
    x_TD: [..., D].
    gain_D: [D].
    numerics: rounding and summation rules.
    eps: added to the mean square.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    [..., D], rounded to `numerics.dtype`.

  Raises:
    ValueError: if the gain does not have the width of the rows.
  """
  if gain_D.shape != x_TD.shape[-1:]:
    raise ValueError(
        f'gain_D {gain_D.shape}: x_TD {x_TD.shape} needs {x_TD.shape[-1:]}'
    )
  fun = nx.choose(impl, IMPLS, 'rms_norm').rms_norm
  return _rms_norm(x_TD, gain_D, eps, numerics, fun)


def rope(x_TNH, positions_T, *, numerics, theta: float = 1e4, impl='auto'):
  """Rotates pairs (x_i, x_{i+H/2}) by position · θ^(-2i/H).

  Source: arXiv:2104.09864 eq. 34, halves paired as in Llama.

  Args:
    x_TNH: [T, N, H], H even.
    positions_T: int32 [T].
    numerics: rounding rules.
    theta: base of the wavelengths.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    [T, N, H], rounded to `numerics.dtype`.

  Raises:
    ValueError: if H is odd, the positions do not fit or theta <= 0.
  """
  if x_TNH.ndim != 3 or x_TNH.shape[-1] % 2:
    raise ValueError(f'x_TNH {x_TNH.shape}: expected [T, N, H] with an even H')
  if positions_T.shape != x_TNH.shape[:1]:
    raise ValueError(
        f'positions_T {positions_T.shape}: x_TNH {x_TNH.shape} needs'
        f' {x_TNH.shape[:1]}'
    )
  if not theta > 0:
    raise ValueError(f'theta={theta}: must be above 0')
  fun = nx.choose(impl, IMPLS, 'rope').rope
  return _rope(x_TNH, positions_T, theta, numerics, fun)


def router(logits_TE, bias_E, *, topk: int, gating: str, numerics, impl='auto'):
  """Chooses the experts of each token and their weights, in slot order.

  softmax: experts = topk(l + b), w = softmax(l over the chosen).
  sigmoid: s = σ(l), experts = topk(s + b), w = s / Σ_chosen s.
  Source: arXiv:2101.03961 (softmax), arXiv:2412.19437 eq. 13-16 (sigmoid and
  the selection bias b, which takes part in the choice only).

  Args:
    logits_TE: float32 [T, E].
    bias_E: float32 [E].
    topk: experts per token, 1..E.
    gating: 'softmax' or 'sigmoid'.
    numerics: summation rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    weights float32 [T, topk] that add up to 1, experts int32 [T, topk] by
    falling score, the lower id first among equals.

  Raises:
    ValueError: on an unknown gating, a topk outside 1..E or shapes that do not
      fit.
  """
  _check_gating(gating)
  if logits_TE.ndim != 2 or bias_E.shape != logits_TE.shape[1:]:
    raise ValueError(
        f'logits_TE {logits_TE.shape} and bias_E {bias_E.shape}: expected'
        ' [T, E] and [E]'
    )
  if not 1 <= topk <= logits_TE.shape[-1]:
    raise ValueError(f'topk={topk}: allowed is 1..{logits_TE.shape[-1]}')
  fun = nx.choose(impl, IMPLS, 'router').router
  return _router(logits_TE, bias_E, topk, gating, numerics, fun)


def router_weights(
    logits_TE, experts_Tk, *, gating: str, numerics, impl='auto'
):
  """Weighs experts that were chosen before: the weights of `router`.

  softmax: w = softmax(l over the given); sigmoid: w = σ(l) / Σ_given σ(l).
  Given the experts that `router` chose, the same bits.

  Args:
    logits_TE: float32 [T, E].
    experts_Tk: int32 [T, topk] in 0..E-1, in slot order.
    gating: 'softmax' or 'sigmoid'.
    numerics: summation rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    float32 [T, topk] that add up to 1.

  Raises:
    ValueError: on an unknown gating or shapes that do not fit.
  """
  _check_gating(gating)
  if logits_TE.ndim != 2 or (
      experts_Tk.ndim != 2 or experts_Tk.shape[0] != logits_TE.shape[0]
  ):
    raise ValueError(
        f'logits_TE {logits_TE.shape} and experts_Tk {experts_Tk.shape}:'
        ' expected [T, E] and [T, topk]'
    )
  fun = nx.choose(impl, IMPLS, 'router_weights').router_weights
  return _router_weights(logits_TE, experts_Tk, gating, numerics, fun)


def _check_gating(gating):
  if gating not in ('softmax', 'sigmoid'):
    raise ValueError(f"gating={gating!r}: allowed are 'softmax' and 'sigmoid'")


def swiglu(gate_TF, up_TF, *, numerics, impl='auto'):
  """y = g · σ(g) · u. Source: arXiv:2002.05202 eq. 6.

  Args:
    gate_TF: [T, F].
    up_TF: [T, F].
    numerics: rounding rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    [T, F], rounded to `numerics.dtype`.

  Raises:
    ValueError: if the two differ in shape.
  """
  if gate_TF.shape != up_TF.shape:
    raise ValueError(
        f'gate_TF {gate_TF.shape} and up_TF {up_TF.shape}: must be equal'
    )
  fun = nx.choose(impl, IMPLS, 'swiglu').swiglu
  return _swiglu(gate_TF, up_TF, numerics, fun)


# Gradients keep the inputs only: what is in between is cheaper to compute again
# than to store. They take no part in the promise of equal bits.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rms_norm(x, gain, eps, numerics, fun):
  return fun(x, gain, eps, numerics)


def _rms_norm_backward(eps, numerics, fun, saved, g):
  del numerics, fun
  x, gain = (a.astype(nx.F32) for a in saved)
  g = g.astype(nx.F32)
  r = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
  y = x * r
  u = g * gain
  dx = r * (u - y * (u * y).mean(-1, keepdims=True))
  dgain = (g * y).reshape(-1, y.shape[-1]).sum(0)
  return dx.astype(saved[0].dtype), dgain.astype(saved[1].dtype)


_rms_norm.defvjp(
    lambda x, gain, *rest: (_rms_norm(x, gain, *rest), (x, gain)),
    _rms_norm_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rope(x, positions, theta, numerics, fun):
  return fun(x, positions, theta, numerics)


def _rope_backward(theta, numerics, fun, positions, g):
  # The transpose of a rotation turns back.
  return fun(g, -positions, theta, numerics), None


_rope.defvjp(
    lambda x, positions, *rest: (_rope(x, positions, *rest), positions),
    _rope_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _swiglu(gate, up, numerics, fun):
  return fun(gate, up, numerics)


def _swiglu_backward(numerics, fun, saved, g):
  del numerics, fun
  gate, up = (a.astype(nx.F32) for a in saved)
  g = g.astype(nx.F32)
  s = jax.nn.sigmoid(gate)
  dgate = g * up * s * (1 + gate * (1 - s))
  dup = g * gate * s
  return dgate.astype(saved[0].dtype), dup.astype(saved[1].dtype)


_swiglu.defvjp(
    lambda gate, up, *rest: (_swiglu(gate, up, *rest), (gate, up)),
    _swiglu_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _router(logits, bias, topk, gating, numerics, fun):
  return fun(logits, bias, topk, gating, numerics)


def _router_forward(logits, bias, topk, gating, numerics, fun):
  weights, experts = fun(logits, bias, topk, gating, numerics)
  return (weights, experts), (logits, bias, weights, experts)


def _router_backward(topk, gating, numerics, fun, saved, grads):
  del topk, numerics, fun
  logits, bias, weights, experts = saved
  dl = _logits_gradient(logits, weights, experts, gating, grads[0])
  return dl, jnp.zeros_like(bias)


_router.defvjp(_router_forward, _router_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _router_weights(logits, experts, gating, numerics, fun):
  return fun(logits, experts, gating, numerics)


def _router_weights_forward(logits, experts, gating, numerics, fun):
  weights = fun(logits, experts, gating, numerics)
  return weights, (logits, weights, experts)


def _router_weights_backward(gating, numerics, fun, saved, g):
  del numerics, fun
  logits, weights, experts = saved
  return _logits_gradient(logits, weights, experts, gating, g), None


_router_weights.defvjp(_router_weights_forward, _router_weights_backward)


def _logits_gradient(logits, weights, experts, gating, g):
  """softmax: dl = w (g - Σ w g); sigmoid: dl = s (1-s) (g - Σ w g) / Σ s."""
  dl = g - (weights * g).sum(-1, keepdims=True)
  if gating == 'softmax':
    dl = weights * dl
  else:
    s = jax.nn.sigmoid(jnp.take_along_axis(logits, experts, -1))
    dl = dl * s * (1 - s) / s.sum(-1, keepdims=True)
  # The experts of a token differ, so at most one slot falls on a logit.
  expert = jnp.arange(logits.shape[-1])
  parts = [
      jnp.where(experts[:, i : i + 1] == expert, dl[:, i : i + 1], 0)
      for i in range(experts.shape[-1])
  ]
  return sum(parts[1:], parts[0]).astype(logits.dtype)
