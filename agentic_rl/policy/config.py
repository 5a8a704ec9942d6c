"""The shape of a policy, checked once, and presets as data."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, Mapping

from kernels_pallas.fp8_matmul import ops as fp8
from kernels_pallas.numerics import PRECISIONS
from kernels_pallas.numerics import Numerics


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """A decoder with interleaved attention and mixture-of-experts layers.

  Attributes:
    vocab: V, entries of the embedding.
    width: D.
    layers: L.
    heads: N query heads.
    kv_heads: K, divides heads.
    head_width: H, even; 0 means width / heads.
    pattern: one letter a layer, repeated: 'w' sliding window, 'b' block-sparse,
      'f' full causal.
    window: visible positions of a 'w' layer.
    page: C, tokens per KV page and per block of a 'b' layer.
    topk_pages: past pages that a 'b' layer selects per token and KV head.
    attention_sink: a learned logit per query head joins every softmax of
      attention and has no value.
    soft_cap: attention scores s become soft_cap · tanh(s / soft_cap); 0 for
      none.
    sink_page: 'w' and 'b' layers also see the first page of a sequence.
    experts: E; 0 for dense feed-forward layers.
    topk_experts: experts per token.
    expert_width: F of one expert.
    shared_width: F of the expert that every token uses; 0 for none.
    dense_layers: how many first layers are dense.
    dense_width: F of a dense layer.
    gating: 'softmax' or 'sigmoid'.
    tied: whether the head is the transposed embedding.
    rope_theta: base of the rotary wavelengths.
    max_context: longest sequence in tokens, a multiple of page.
    precision: 'float32', 'bfloat16' or 'fp8': bfloat16, and the layers' matrix
      products of 8-bit floats (see `kernels_pallas.fp8_matmul`). Norms, router,
      embedding and head are not among these.
    exact: False only in the control arm (see `kernels_pallas.numerics`).
    impl: implementation of every op: 'auto', 'xla' or 'reference'.
    remat: recompute each layer's activations in the backward pass.

  Raises:
    ValueError: names the field, its value and what is allowed.
  """

  vocab: int = 512
  width: int = 128
  layers: int = 8
  heads: int = 4
  kv_heads: int = 2
  head_width: int = 0
  pattern: str = 'wwwb'
  window: int = 32
  page: int = 16
  topk_pages: int = 4
  attention_sink: bool = False
  soft_cap: float = 0.0
  sink_page: bool = False
  experts: int = 8
  topk_experts: int = 2
  expert_width: int = 64
  shared_width: int = 0
  dense_layers: int = 0
  dense_width: int = 256
  gating: str = 'softmax'
  tied: bool = False
  rope_theta: float = 1e4
  max_context: int = 256
  precision: str = 'float32'
  exact: bool = True
  impl: str = 'auto'
  remat: bool = False

  def __post_init__(self):
    kinds = {'int': (int,), 'float': (int, float), 'bool': (bool,)}
    for field in dataclasses.fields(self):
      kind = kinds.get(str(field.type), (str,))
      holds = type(getattr(self, field.name)) in kind
      _need(holds, self, field.name, f'{field.type} values')
      if kind == (int,):
        least = 0 if field.name in _MAY_BE_ZERO else 1
        value = getattr(self, field.name)
        _need(value >= least, self, field.name, f'at least {least}')
        _need(value <= _LARGEST, self, field.name, f'at most {_LARGEST}')
    if not self.head_width:
      _need(self.width % self.heads == 0, self, 'width', 'a multiple of heads')
      object.__setattr__(self, 'head_width', self.width // self.heads)
    _need(self.head_width % 2 == 0, self, 'head_width', 'an even number')
    _need(self.heads % self.kv_heads == 0, self, 'heads', 'kv_heads x integer')
    _need(0 < self.rope_theta < math.inf, self, 'rope_theta', 'above 0')
    _need(0 <= self.soft_cap < math.inf, self, 'soft_cap', '0 or above')
    _need(self.page % 8 == 0, self, 'page', 'a multiple of 8')
    _need(
        self.max_context % self.page == 0,
        self,
        'max_context',
        f'a multiple of page={self.page}',
    )
    _need(
        bool(self.pattern) and set(self.pattern) <= set('wbf'),
        self,
        'pattern',
        "letters 'w', 'b' and 'f'",
    )
    _need(
        0 <= self.dense_layers <= self.layers,
        self,
        'dense_layers',
        f'0..layers={self.layers}',
    )
    _need(
        (self.layers - self.dense_layers) % len(self.pattern) == 0,
        self,
        'layers',
        f'dense_layers + a multiple of the pattern {self.pattern!r}',
    )
    if self.experts:
      _need(
          1 <= self.topk_experts <= self.experts,
          self,
          'topk_experts',
          f'1..experts={self.experts}',
      )
    _need(
        self.gating in ('softmax', 'sigmoid'),
        self,
        'gating',
        "'softmax' or 'sigmoid'",
    )
    _need(
        self.precision in PRECISIONS,
        self,
        'precision',
        f'one of {PRECISIONS}',
    )
    if self.numerics.quantized:
      _check_blocks(self)

  @property
  def numerics(self) -> Numerics:
    """Rounding and summation rules of every op."""
    return Numerics(self.precision, self.exact)

  @property
  def groups(self) -> int:
    """Scanned repetitions of the pattern after the first dense layers."""
    return (self.layers - self.dense_layers) // len(self.pattern)

  @property
  def moe_layers(self) -> int:
    """Layers with a router."""
    return self.layers - self.dense_layers if self.experts else 0

  @property
  def pages_per_sequence(self) -> int:
    """W, pages of the longest sequence."""
    return self.max_context // self.page


def _need(holds: bool, config: PolicyConfig, name: str, allowed: str) -> None:
  if not holds:
    raise ValueError(
        f'policy.{name}={getattr(config, name)!r}: allowed is {allowed}'
    )


def _check_blocks(config: PolicyConfig) -> None:
  """Raises ValueError unless every matrix of a layer has whole blocks."""
  c, block = config, fp8.BLOCK
  experts = c.expert_width if c.moe_layers else 0
  dense = c.dense_width if c.dense_layers or not c.experts else 0
  sizes = {
      'width': (c.width,),
      'head_width': (c.heads * c.head_width, 2 * c.kv_heads * c.head_width),
      'expert_width': (experts, 2 * experts),
      'shared_width': (c.shared_width, 2 * c.shared_width),
      'dense_width': (dense, 2 * dense),
  }
  for name, needed in sizes.items():
    for size in needed:
      _need(
          size <= block or size % block == 0,
          config,
          name,
          f'a matrix side of at most {block}, or a multiple of it, with'
          f" precision='fp8', not {size}",
      )


_LARGEST = (1 << 31) - 1  # positions are int32
_MAY_BE_ZERO = ('head_width', 'experts', 'shared_width', 'dense_layers')

# Deep and narrow by default: few heads, many layers, small experts.
PRESETS: dict[str, dict[str, Any]] = {
    'small': {},
    'tiny': dict(width=64, layers=4, heads=4, expert_width=32, experts=4),
    'dense': dict(experts=0, dense_width=256),
}


def make(preset: str, overrides: Mapping[str, Any]) -> PolicyConfig:
  """Returns the preset with some fields replaced.

  Raises:
    ValueError: on an unknown preset or field; the message lists near ones.
  """
  if preset not in PRESETS:
    raise ValueError(f'preset={preset!r}: allowed are {sorted(PRESETS)}')
  fields = [f.name for f in dataclasses.fields(PolicyConfig)]
  for name in overrides:
    if name not in fields:
      near = difflib.get_close_matches(name, fields) or fields
      raise ValueError(f'policy.{name}: unknown field; near ones: {near}')
  return PolicyConfig(**{**PRESETS[preset], **overrides})
