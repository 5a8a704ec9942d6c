"""Makes the folders beside it with the library whose format they have.

  python tests/policy/huggingface/make.py [FOLDER]

needs torch and transformers, which nothing else here does; the folders were
made with torch 2.13.0 and transformers 5.24.0. Each holds a tiny random model
as `save_pretrained` writes it and `expected.npz`: tokens int32 [B, T] and the
library's log-probs of tokens[:, 1:], computed in float32.

  dense  Qwen3 in one bfloat16 file: tied, heads wider than width / heads, and
         a tokenizer.
  moe    Qwen3-MoE in several float32 files: the first layer dense.
"""

import pathlib
import sys

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

TEXT = 'def low(a, b):\n  return a + b * 4\nFAIL core.py 6 got 10 want -5\n'
DENSE = dict(
    vocab_size=280, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    tie_word_embeddings=True, max_position_embeddings=250, bos_token_id=None,
    eos_token_id=[1, 0], rope_parameters=dict(
        rope_theta=1e6, rope_type='default'
    ),
)  # fmt: skip
MOE = dict(
    vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=16,
    num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    mlp_only_layers=[0], max_position_embeddings=128,
    rope_parameters=dict(rope_theta=1e4, rope_type='default'),
)  # fmt: skip


@torch.no_grad()
def fill(model, seed, dtype):
  """Gives the model weights under which every part of it matters."""
  generator = torch.Generator().manual_seed(seed)
  for name, weight in model.named_parameters():
    value = torch.randn(weight.shape, generator=generator)
    if name.endswith('norm.weight'):
      value = 1 + 0.3 * value
    else:
      value *= weight.shape[-1] ** -0.5
    weight.copy_(value.to(dtype))


def save(folder, model, seed, dtype, shard, rows=2):
  """Writes the model and what it makes of random tokens."""
  fill(model, seed, dtype)
  rng = np.random.default_rng(seed)
  length = min(100, model.config.max_position_embeddings)
  shape = (rows, length)
  tokens = rng.integers(0, model.config.vocab_size, shape, np.int32)
  with torch.no_grad():
    logits = model.eval()(torch.from_numpy(tokens).long()).logits
  logp = torch.log_softmax(logits, -1).numpy()[:, :-1]
  logp = np.take_along_axis(logp, tokens[:, 1:, None].astype(int), -1)[..., 0]
  # Only now: this rounds the frequencies of the positions, too.
  model.to(dtype).save_pretrained(folder, max_shard_size=shard)
  (folder / 'generation_config.json').unlink()
  np.savez(folder / 'expected.npz', tokens=tokens, logp=logp)


def save_tokenizer(folder):
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = trainers.BpeTrainer(
      vocab_size=280,
      special_tokens=['<|endoftext|>', '<|im_end|>'],
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
  )
  tokenizer.train_from_iterator([TEXT], trainer)
  tokenizer.save(str(folder / 'tokenizer.json'))


def main():
  here = pathlib.Path(sys.argv[1] if sys.argv[1:] else __file__).absolute()
  here = here if here.is_dir() else here.parent
  save(
      here / 'dense',
      transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DENSE)),
      0,
      torch.bfloat16,
      '1GB',
  )
  save_tokenizer(here / 'dense')
  save(
      here / 'moe',
      transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)),
      1,
      torch.float32,
      '60KB',
  )


if __name__ == '__main__':
  main()
