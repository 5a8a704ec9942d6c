"""Reads a policy from a local folder in the format of Hugging Face.

The folder holds `config.json`, the weights in the format safetensors, and
perhaps `tokenizer.json`. Two architectures have the equations of `forward`:
Qwen3 and Qwen3-MoE (arXiv:2505.09388). A config that changes the equations is
an error, and so is a tensor without a place or a place without its tensor.
"""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from agentic_rl.policy import model
from agentic_rl.policy import tensor_files
from agentic_rl.policy.config import PolicyConfig

ARCHITECTURES = {
    'Qwen3ForCausalLM': 'qwen3',
    'Qwen3MoeForCausalLM': 'qwen3_moe',
}
# Fields that may be absent, or else have this value.
_FIXED: dict[str, Any] = {
    'hidden_act': 'silu',
    'rms_norm_eps': 1e-6,
    'attention_bias': False,
    'attention_dropout': 0,
    'use_sliding_window': False,
    'decoder_sparse_step': 1,
    'quantization_config': None,
}
# Fields that do not change what is computed.
_IDLE = (
    '_name_or_path', 'bos_token_id', 'chunk_size_feed_forward', 'dtype',
    'eos_token_id', 'id2label', 'initializer_range', 'is_encoder_decoder',
    'label2id', 'max_window_layers', 'output_attentions',
    'output_hidden_states', 'output_router_logits', 'pad_token_id',
    'problem_type', 'return_dict', 'router_aux_loss_coef', 'sliding_window',
    'torch_dtype', 'transformers_version', 'use_cache',
)  # fmt: skip
# Tensors of a layer that are the transposed of a weight.
_TRANSPOSED = {
    'attention_norm': 'input_layernorm',
    'query_norm': 'self_attn.q_norm',
    'key_norm': 'self_attn.k_norm',
    'query': 'self_attn.q_proj',
    'output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'router': 'mlp.gate',
    'dense_out': 'mlp.down_proj',
}


class _Config:
  """The fields of `config.json`; errors name the file, field and value."""

  def __init__(self, folder: str | os.PathLike[str]):
    self.path = pathlib.Path(folder) / 'config.json'
    self.values = tensor_files.read_object(self.path)
    self.seen = set(_IDLE)

  def get(self, name: str, default: Any = None) -> Any:
    self.seen.add(name)
    return self.values.get(name, default)

  def need(self, holds: bool, name: str, allowed: str) -> None:
    if not holds:
      shown = repr(self.values[name]) if name in self.values else 'absent'
      raise ValueError(f'{self.path}: {name}={shown}: allowed is {allowed}')

  def number(self, name: str) -> int:
    value = self.get(name)
    self.need(type(value) is int and value > 0, name, 'a whole number above 0')
    return value


def fields(
    folder: str | os.PathLike[str], page: int = PolicyConfig.page
) -> dict[str, Any]:
  """Returns the fields of `PolicyConfig` for which the weights are made.

  Args:
    folder: in the format of Hugging Face.
    page: of which max_context is to be a multiple.

  Raises:
    ValueError: the config asks for what `forward` does not compute.
    OSError: `config.json` can not be read.
  """
  config = _Config(folder)
  need, number, get = config.need, config.number, config.get
  allowed = [[name] for name in ARCHITECTURES]
  need(get('architectures') in allowed, 'architectures', f'one of {allowed}')
  kind = ARCHITECTURES[config.values['architectures'][0]]
  need(get('model_type') == kind, 'model_type', repr(kind))
  for name, value in _FIXED.items():
    need(get(name, value) == value, name, f'{value!r}')
  layers = number('num_hidden_layers')
  full = get('layer_types') in (None, ['full_attention'] * layers)
  need(full, 'layer_types', f"'full_attention' in each of {layers}")
  tied = get('tie_word_embeddings', False)
  need(type(tied) is bool, 'tie_word_embeddings', 'true or false')
  context = number('max_position_embeddings') // page * page
  need(context > 0, 'max_position_embeddings', f'page={page} or more')
  # A missing width of heads means 128 in the one, and this in the other.
  own_width = kind == 'qwen3' or get('head_dim') is not None
  out = dict(
      vocab=number('vocab_size'),
      width=number('hidden_size'),
      layers=layers,
      heads=number('num_attention_heads'),
      kv_heads=number('num_key_value_heads'),
      head_width=number('head_dim') if own_width else 0,
      pattern='f',
      attention_sink=False,
      soft_cap=0.0,
      sink_page=False,
      **(_experts(config, layers) if kind == 'qwen3_moe' else {'experts': 0}),
      shared_width=0,
      dense_width=number('intermediate_size'),
      gating='softmax',
      tied=tied,
      rope_theta=_rope_theta(config),
      max_context=context,
  )
  for name in config.values:
    need(name in config.seen, name, 'absent: its meaning is not known here')
  return out


def _experts(config: _Config, layers: int) -> dict[str, Any]:
  need, number, get = config.need, config.number, config.get
  # Weights that add up to 1 are those of a softmax over the chosen.
  need(get('norm_topk_prob') is True, 'norm_topk_prob', 'True')
  dense = get('mlp_only_layers') or []
  first = dense in [list(range(n)) for n in range(layers + 1)]
  need(first, 'mlp_only_layers', 'the first layers, in order')
  named = [n for n in ('num_experts', 'num_local_experts') if get(n)]
  need(len(named) == 1, 'num_experts', 'it or num_local_experts')
  return dict(
      experts=number(named[0]),
      topk_experts=number('num_experts_per_tok'),
      expert_width=number('moe_intermediate_size'),
      dense_layers=len(dense),
  )


def _rope_theta(config: _Config) -> float:
  """Returns the base of the wavelengths; newer configs have it in an object."""
  bases = [config.get('rope_theta')]
  for name in ('rope_scaling', 'rope_parameters'):
    rope = config.get(name) or {}
    config.need(isinstance(rope, dict), name, 'an object')
    bases.append(rope.get('rope_theta'))
    kinds = {k: v for k, v in rope.items() if k != 'rope_theta'}
    plain = kinds.keys() <= {'type', 'rope_type'}
    plain = plain and all(v == 'default' for v in kinds.values())
    config.need(plain, name, "rope_theta and rope_type 'default'")
  name = 'rope_theta' if 'rope_theta' in config.values else 'rope_parameters'
  found = [b for b in bases if b is not None]
  one = bool(found) and found.count(found[0]) == len(found)
  config.need(one, name, 'one rope_theta')
  sound = type(found[0]) in (int, float) and 0 < found[0] < math.inf
  config.need(sound, name, 'a rope_theta above 0')
  return float(found[0])


def weights(
    folder: str | os.PathLike[str], cfg: PolicyConfig
) -> dict[str, Any]:
  """Returns the weights as `model.init` does, rounded to cfg's precision.

  Args:
    folder: in the format of Hugging Face.
    cfg: shape of the policy, from `fields`.

  Raises:
    ValueError: a tensor is missing, has no place or another shape, or a file is
      damaged; the message names it.
    OSError: a file can not be read.
  """
  leaves, tree = jax.tree_util.tree_flatten_with_path(_read(folder, cfg))
  for i, (path, array) in enumerate(leaves):
    leaves[i] = None  # an array is freed once it is on the device
    array = jnp.asarray(array)
    if not model.is_balance(path):
      array = cfg.numerics.cast(array)
    leaves[i] = jax.block_until_ready(array)
  return jax.tree_util.tree_unflatten(tree, leaves)


def _read(folder, cfg: PolicyConfig) -> dict[str, Any]:
  """Returns the weights as NumPy's arrays, not rounded where it is emulated."""
  tensors = tensor_files.Tensors(folder)
  shapes = jax.eval_shape(lambda: model.init(cfg, 0))
  out = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
  embedding, head = 'model.embed_tokens.weight', 'lm_head.weight'
  vocabulary = (cfg.vocab, cfg.width)
  out['embedding'][...] = tensors.read(embedding, vocabulary)
  out['final_norm'][...] = tensors.read('model.norm.weight', (cfg.width,))
  if not cfg.tied:
    out['head'][...] = tensors.read(head, vocabulary).T
  elif head in tensors:  # some tied policies are stored with both
    one, other = (tensors.read(name, vocabulary) for name in (head, embedding))
    if not np.array_equal(one, other):
      raise ValueError(
          f'{folder}: tensor {head!r} differs from {embedding!r}; allowed with'
          ' tie_word_embeddings=True are equal ones'
      )
  for number in range(cfg.layers):
    if number < cfg.dense_layers:
      layer = out['first'][number]
    else:
      group, place = divmod(number - cfg.dense_layers, len(cfg.pattern))
      layer = {k: v[group] for k, v in out['pattern'][place].items()}
    for name, array in layer.items():
      _fill(name, array, f'model.layers.{number}', tensors, cfg)
  unused = tensors.unused()
  if unused:
    raise ValueError(
        f'{folder}: tensor {unused[0]!r} has no place in the policy; there are'
        f' {len(unused)} such tensors'
    )
  return out


def _fill(name: str, out, layer: str, tensors, cfg: PolicyConfig) -> None:
  """Fills one weight of a layer in place; `layer` begins the tensors' names."""
  if name in _TRANSPOSED:
    part = f'{layer}.{_TRANSPOSED[name]}.weight'
    out[...] = tensors.read(part, out.T.shape).T
  elif name == 'key_value':  # head by head, a key before its value
    heads = out.reshape(-1, cfg.kv_heads, 2, cfg.head_width)
    shape = (cfg.kv_heads * cfg.head_width, cfg.width)
    for i, part in enumerate(('k_proj', 'v_proj')):
      rows = tensors.read(f'{layer}.self_attn.{part}.weight', shape)
      heads[:, :, i] = rows.T.reshape(heads[:, :, i].shape)
  elif name == 'dense_in':
    _gate_up(out, f'{layer}.mlp', tensors)
  elif name == 'expert_in':
    for e, expert in enumerate(out):
      _gate_up(expert, f'{layer}.mlp.experts.{e}', tensors)
  elif name == 'expert_out':
    for e, expert in enumerate(out):
      part = f'{layer}.mlp.experts.{e}.down_proj.weight'
      expert[...] = tensors.read(part, expert.T.shape).T
  elif name != 'balance':  # which is zero
    raise ValueError(f'{tensors.folder} has no tensor for the weight {name!r}')


def _gate_up(out, module: str, tensors) -> None:
  """Fills [D, 2F]: the gate, then what it opens."""
  for half, part in zip(np.split(out, 2, 1), ('gate_proj', 'up_proj')):
    half[...] = tensors.read(f'{module}.{part}.weight', half.T.shape).T


class Tokenizer:
  """The tokenizer of a folder.

  Attributes:
    bos: id that begins a sequence; one that ends it, if there is no other.
    vocab_size: V of the policy, which may be above the number of ids.

  Raises:
    ValueError: `tokenizer.json` is damaged, or does not fit `config.json`.
    OSError: a file can not be read.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    config = _Config(folder)
    self.vocab_size = config.number('vocab_size')
    allowed = f'0 to {self.vocab_size - 1}'
    path = config.path.with_name('tokenizer.json')
    content = path.read_bytes()
    try:
      self._model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # it has no type of its own
      raise ValueError(f'{path}: {error}') from None
    self._model.no_truncation()
    self._model.no_padding()
    largest = max(self._model.get_vocab().values(), default=0)
    if largest >= self.vocab_size:
      raise ValueError(f'{path}: token {largest}; allowed are {allowed}')
    name = 'bos_token_id'
    if config.get(name) is None:
      name = 'eos_token_id'
    value = config.get(name)
    bos = value[0] if isinstance(value, list) and value else value
    within = type(bos) is int and 0 <= bos < self.vocab_size
    config.need(within, name, allowed)
    self.bos: int = bos

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text alone, nothing before or after it.

    Raises:
      ValueError: the text has a lone surrogate, so it has no UTF-8.
    """
    text.encode()  # UnicodeEncodeError is a ValueError and names the place
    return self._model.encode(text, add_special_tokens=False).ids


def tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
  """Returns the tokenizer of a folder; see `Tokenizer` for errors."""
  return Tokenizer(folder)
