"""Operations on single rows: normalisation, rotary positions, router.

They are one op so that an accelerator kernel can hold them whole: XLA may
fuse the same element-wise chain differently in two programs.
"""

from __future__ import annotations

from kernels_pallas import numerics as nx
from kernels_pallas.row_ops import reference
from kernels_pallas.row_ops import xla

IMPLS = {'xla': xla, 'reference': reference}


def rms_norm(x_TD, gain_D, *, numerics, eps: float = 1e-6, impl='auto'):
  """y = x / sqrt(mean(x²) + ε) · g. Source: arXiv:1910.07467 eq. 4.

  Args:
    x_TD: [..., D].
    gain_D: [D].
    numerics: rounding and summation rules.
    eps: added to the mean square.
    impl: 'auto', 'xla' or 'reference'.

  Returns:
    [..., D], rounded to `numerics.dtype`.

  Raises:
    ValueError: if the gain does not have the width of the rows.
  """
  if gain_D.shape != x_TD.shape[-1:]:
    raise ValueError(
        f'gain_D {gain_D.shape}: rows of {x_TD.shape} need {x_TD.shape[-1:]}'
    )
  fun = nx.choose(impl, IMPLS, 'rms_norm').rms_norm
  return fun(x_TD, gain_D, eps, numerics)


def rope(x_TNH, positions_T, *, numerics, theta: float = 1e4, impl='auto'):
  """Rotates pairs (x_i, x_{i+H/2}) by position · θ^(-2i/H).

  Source: arXiv:2104.09864 eq. 34, halves paired as in Llama.

  Args:
    x_TNH: [T, N, H], H even.
    positions_T: int32 [T].
    numerics: rounding rules.
    theta: base of the wavelengths.
    impl: 'auto', 'xla' or 'reference'.

  Returns:
    [T, N, H], rounded to `numerics.dtype`.

  Raises:
    ValueError: if H is odd.
  """
  if x_TNH.shape[-1] % 2:
    raise ValueError(f'head width {x_TNH.shape[-1]}: rope needs an even width')
  fun = nx.choose(impl, IMPLS, 'rope').rope
  return fun(x_TNH, positions_T, theta, numerics)


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
    impl: 'auto', 'xla' or 'reference'.

  Returns:
    weights float32 [T, topk] that add up to 1, experts int32 [T, topk] by
    falling score, the lower id first among equals.

  Raises:
    ValueError: on an unknown gating or a topk outside 1..E.
  """
  if gating not in ('softmax', 'sigmoid'):
    raise ValueError(f"gating={gating!r}: allowed are 'softmax' and 'sigmoid'")
  if not 1 <= topk <= logits_TE.shape[-1]:
    raise ValueError(f'topk={topk}: allowed is 1..{logits_TE.shape[-1]}')
  fun = nx.choose(impl, IMPLS, 'router').router
  return fun(logits_TE, bias_E, topk, gating, numerics)


def swiglu(gate_TF, up_TF, *, numerics, impl='auto'):
  """y = g · σ(g) · u. Source: arXiv:2002.05202 eq. 6.

  Args:
    gate_TF: [T, F].
    up_TF: [T, F].
    numerics: rounding rules.
    impl: 'auto', 'xla' or 'reference'.

  Returns:
    [T, F], rounded to `numerics.dtype`.
  """
  fun = nx.choose(impl, IMPLS, 'swiglu').swiglu
  return fun(gate_TF, up_TF, numerics)
