"""Policies in the format of Hugging Face, against the library of that name.

The folders beside are of `huggingface/make.py`, which needs that library.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.diagnostics import precision
from agentic_rl.policy import config as policy_config
from agentic_rl.policy import huggingface
from agentic_rl.policy import tensor_files
from launch import verify

HERE = pathlib.Path(__file__).parent / 'huggingface'
DENSE, MOE = HERE / 'dense', HERE / 'moe'
TEXT = 'def low(a, b):\n  return a + b * 4\nFAIL core.py 6 got 10 want -5\n'


def make_cfg(folder, **more):
  fields = huggingface.fields(folder) | dict(max_context=128)
  return policy_config.make('small', fields | more)


def read(path):
  """Returns {name: (dtype, shape, bytes)} of a file, read independently."""
  content = path.read_bytes()
  start = 8 + int.from_bytes(content[:8], 'little')
  header = json.loads(content[8:start])
  header.pop('__metadata__')
  return {
      name: (e['dtype'], e['shape'], content[start:][slice(*e['data_offsets'])])
      for name, e in header.items()
  }


def write(path, tensors):
  header, data = {'__metadata__': {'format': 'np'}}, b''
  for name, (dtype, shape, content) in tensors.items():
    places = [len(data), len(data) + len(content)]
    header[name] = dict(dtype=dtype, shape=shape, data_offsets=places)
    data += content
  head = json.dumps(header).encode()
  path.write_bytes(len(head).to_bytes(8, 'little') + head + data)


@pytest.fixture
def copy(tmp_path):
  """Copies a folder, with changes to its config."""

  def make(folder, **change):
    out = tmp_path / folder.name
    shutil.copytree(folder, out, dirs_exist_ok=True)
    config = json.loads((out / 'config.json').read_text()) | change
    config = {k: v for k, v in config.items() if v != 'absent'}
    (out / 'config.json').write_text(json.dumps(config))
    return out

  return make


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    np.testing.assert_array_equal(x, y)


# Against the library.


@pytest.mark.parametrize('folder', [DENSE, MOE], ids=lambda f: f.name)
def test_the_librarys_log_probs(folder):
  """Both have grouped heads; see `make.py` for what else they have."""
  cfg = make_cfg(folder)
  arm = precision.Arm(cfg, huggingface.weights(folder, cfg))
  expected = np.load(folder / 'expected.npz')
  assert expected['logp'].std() > 0.5
  for tokens, logp in zip(expected['tokens'], expected['logp']):
    found = arm.read(tokens).logp_T[: len(logp)]
    np.testing.assert_allclose(found, logp, rtol=0, atol=1e-5)


def test_fields():
  dense, moe = huggingface.fields(DENSE), huggingface.fields(MOE)
  assert (dense['tied'], dense['experts'], dense['head_width']) == (True, 0, 16)
  assert (dense['rope_theta'], dense['vocab'], dense['width']) == (1e6, 280, 32)
  assert (dense['max_context'], dense['pattern']) == (240, 'f')
  assert huggingface.fields(DENSE, page=8)['max_context'] == 248
  assert (moe['experts'], moe['topk_experts'], moe['expert_width']) == (
      4,
      2,
      16,
  )
  assert (moe['dense_layers'], moe['dense_width'], moe['tied']) == (
      1,
      48,
      False,
  )
  assert make_cfg(MOE).head_width == 8


def test_older_names_of_fields(copy):
  folder = copy(
      MOE,
      rope_parameters='absent', rope_theta=10000, rope_scaling=None,
      num_local_experts='absent', num_experts=4, torch_dtype='float32',
  )  # fmt: skip
  assert huggingface.fields(folder) == huggingface.fields(MOE)


def test_layers_go_to_their_place_in_the_pattern():
  one = huggingface.weights(DENSE, make_cfg(DENSE))['pattern']
  two = huggingface.weights(DENSE, make_cfg(DENSE, pattern='wf'))['pattern']
  assert sorted(one) == [0] and sorted(two) == [0, 1]
  for layer in (0, 1):
    there = jax.tree.map(lambda a, n=layer: a[n : n + 1], one[0])
    assert_same(there, two[layer])
  assert (one[0]['query'][0] != one[0]['query'][1]).any()


def rounded(tree):
  return jax.tree.map(
      lambda a: np.asarray(a).astype(jnp.bfloat16).astype(np.float32), tree
  )


@pytest.mark.parametrize('folder', [DENSE, MOE], ids=lambda f: f.name)
def test_rounding(folder):
  full = huggingface.weights(folder, make_cfg(folder))
  low = huggingface.weights(folder, make_cfg(folder, precision='bfloat16'))
  assert_same(low, rounded(full))
  # Weights stored in bfloat16 are themselves in any precision.
  stored = read(sorted(folder.glob('*.safetensors'))[0])
  changed = (low['final_norm'] != full['final_norm']).any()
  assert changed == ({e[0] for e in stored.values()} == {'F32'})


def test_float16(copy):
  folder, name = copy(DENSE), 'model.norm.weight'
  tensors = read(DENSE / 'model.safetensors')
  data = np.linspace(0.3, 0.4, 32).astype(np.float16)
  tensors[name] = ('F16', [32], data.tobytes())
  write(folder / 'model.safetensors', tensors)
  norm = huggingface.weights(folder, make_cfg(folder))['final_norm']
  np.testing.assert_array_equal(norm, data.astype(np.float32))


# Tensors.


def merged():
  tensors = {}
  for path in sorted(MOE.glob('*.safetensors')):
    tensors |= read(path)
  return tensors


@pytest.fixture
def single(copy):
  """A copy of the folder in one file, and its tensors."""
  folder = copy(MOE)
  for path in folder.glob('model*'):
    path.unlink()
  write(folder / 'model.safetensors', merged())
  return folder


def test_one_file_or_several(single):
  assert len(list(MOE.glob('*.safetensors'))) == 3
  cfg = make_cfg(MOE)
  found = huggingface.weights(single, cfg)
  assert_same(found, huggingface.weights(MOE, cfg))


def test_a_tied_head_that_is_stored(copy):
  folder = copy(DENSE)
  tensors = read(DENSE / 'model.safetensors')
  dtype, shape, data = tensors['model.embed_tokens.weight']
  write(
      folder / 'model.safetensors',
      tensors | {'lm_head.weight': (dtype, shape, data)},
  )
  cfg = make_cfg(DENSE)
  found = huggingface.weights(folder, cfg)
  assert_same(found, huggingface.weights(DENSE, cfg))
  data = bytes([data[0] ^ 1]) + data[1:]
  write(
      folder / 'model.safetensors',
      tensors | {'lm_head.weight': (dtype, shape, data)},
  )
  with pytest.raises(
      ValueError, match="'lm_head.weight' differs from 'model.e"
  ):
    huggingface.weights(folder, cfg)


def transposed(entry):
  dtype, shape, data = entry
  return dtype, shape[::-1], data


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('lm_head.weight', None, 'lacks the tensor'),
        ('model.layers.2.mlp.experts.3.up_proj.weight', None, 'lacks the tens'),
        ('model.layers.1.mlp.gate.bias', ('F32', [4], bytes(16)), 'no place'),
        ('model.layers.3.mlp.gate.weight', ('F32', [0], b''), 'no place'),
        ('model.layers.0.mlp.up_proj.weight', transposed, r'\[32, 48\]; allow'),
        (
            'model.layers.1.self_attn.k_proj.weight',
            ('F32', [32, 32], bytes(4096)),
            r'\[32, 32\]; allowed is \[16, 32\]',
        ),
        (
            'model.norm.weight',
            ('F64', [32], bytes(256)),
            'of type F64; allowed',
        ),
        ('model.norm.weight', ('F32', [32], bytes(64)), 'is damaged: 64 bytes'),
        ('model.norm.weight', ('F32', 32, bytes(128)), 'has no sound entry'),
    ],
)
def test_wrong_tensors(name, change, message, single):
  tensors = merged()
  if change is None:
    del tensors[name]
  else:
    tensors[name] = change(tensors[name]) if callable(change) else change
  write(single / 'model.safetensors', tensors)
  with pytest.raises(ValueError, match=message) as error:
    huggingface.weights(single, make_cfg(MOE))
  assert repr(name) in str(error.value) and str(single) in str(error.value)


@pytest.mark.parametrize('share', [0, 0.001, 0.02, 0.9, 0.9999])
def test_a_file_that_is_cut_off(share, single):
  path = single / 'model.safetensors'
  content = path.read_bytes()
  path.write_bytes(content[: int(share * len(content))])
  with pytest.raises(ValueError, match=str(path)):
    huggingface.weights(single, make_cfg(MOE))


def test_an_index_that_does_not_fit(copy):
  folder = copy(MOE)
  path = folder / tensor_files.INDEX
  index = json.loads(path.read_text())
  name, first, last = (
      'lm_head.weight',
      *sorted(set(index['weight_map'].values()))[::2],
  )
  for change, message in (
      ({name: last}, f"{first} holds the tensor '{name}'; .* says '{last}'"),
      ({'more': last}, f"{last} lacks the tensor 'more'"),
  ):
    weight_map = index['weight_map'] | change
    path.write_text(json.dumps({'weight_map': weight_map}))
    with pytest.raises(ValueError, match=message):
      huggingface.weights(folder, make_cfg(MOE))
  path.write_text('{}')
  with pytest.raises(ValueError, match='no weight_map'):
    huggingface.weights(folder, make_cfg(MOE))
  (folder / first).rename(folder / 'model.safetensors')
  with pytest.raises(ValueError, match='allowed is one'):
    huggingface.weights(folder, make_cfg(MOE))


def test_a_folder_without_weights(tmp_path):
  with pytest.raises(OSError, match='model.safetensors'):
    huggingface.weights(tmp_path, make_cfg(MOE))


# Configs.


@pytest.mark.parametrize(
    ('folder', 'name', 'value', 'allowed'),
    [
        (MOE, 'architectures', ['LlamaForCausalLM'], 'Qwen3ForCausalLM'),
        (MOE, 'architectures', 'absent', 'Qwen3MoeForCausalLM'),
        (MOE, 'model_type', 'qwen3', "'qwen3_moe'"),
        (MOE, 'hidden_act', 'gelu', "'silu'"),
        (MOE, 'rms_norm_eps', 1e-5, '1e-06'),
        (MOE, 'attention_bias', True, 'False'),
        (MOE, 'attention_dropout', 0.1, '0'),
        (DENSE, 'use_sliding_window', True, 'False'),
        (DENSE, 'layer_types', ['full_attention', 'sliding_attention'], 'each'),
        (DENSE, 'layer_types', 3, 'each of 2'),
        (DENSE, 'head_dim', 'absent', 'a whole number above 0'),
        (DENSE, 'hidden_size', 32.0, 'a whole number above 0'),
        (DENSE, 'tie_word_embeddings', None, 'true or false'),
        (DENSE, 'max_position_embeddings', 15, 'page=16 or more'),
        (MOE, 'norm_topk_prob', False, 'True'),
        (MOE, 'norm_topk_prob', 'absent', 'True'),
        (MOE, 'decoder_sparse_step', 2, '1'),
        (MOE, 'mlp_only_layers', [1], 'the first layers'),
        (MOE, 'mlp_only_layers', [0, 1, 2, 3], 'the first layers'),
        (MOE, 'num_experts', 8, 'it or num_local_experts'),
        (MOE, 'num_experts_per_tok', 'absent', 'a whole number above 0'),
        (MOE, 'rope_scaling', {'rope_type': 'yarn', 'factor': 4}, 'rope_theta'),
        (MOE, 'rope_scaling', {'type': 'linear'}, "rope_type 'default'"),
        (MOE, 'rope_scaling', 4, 'an object'),
        (MOE, 'rope_parameters', {'full_attention': {}}, 'rope_theta and'),
        (MOE, 'rope_parameters', 'absent', 'one rope_theta'),
        (MOE, 'rope_parameters', {'rope_theta': '1'}, 'a rope_theta above 0'),
        (MOE, 'rope_theta', 5e5, 'one rope_theta'),
        (MOE, 'quantization_config', {'quant_method': 'fp8'}, 'None'),
        (MOE, 'shared_expert_size', 64, 'absent: its meaning'),
    ],
)
def test_what_the_policy_can_not_be(folder, name, value, allowed, copy):
  folder = copy(folder, **{name: value})
  with pytest.raises(ValueError) as error:
    huggingface.fields(folder)
  shown = 'absent' if value == 'absent' else repr(value)
  assert f'{folder}/config.json: {name}={shown}: allowed' in str(error.value)
  assert allowed in str(error.value)


def test_a_config_that_is_none(tmp_path):
  path = tmp_path / 'config.json'
  with pytest.raises(OSError, match='config.json'):
    huggingface.fields(tmp_path)
  for content in ('{', '[]', '\xff'):
    path.write_text(content, encoding='latin-1')
    with pytest.raises(ValueError, match=str(path)):
      huggingface.fields(tmp_path)


# Tokenizers.


def test_tokenizer(copy):
  tokenizer = huggingface.tokenizer(DENSE)
  assert tokenizer.vocab_size == 280 and tokenizer.bos == 1
  ids = tokenizer.encode(TEXT)
  vocab = json.loads((DENSE / 'tokenizer.json').read_text())['model']['vocab']
  names = {n: t for t, n in vocab.items()}
  letters = ''.join(names[i] for i in ids)
  assert letters.replace('Ġ', ' ').replace('Ċ', '\n') == TEXT
  assert len(ids) < len(TEXT)
  assert huggingface.tokenizer(copy(DENSE, bos_token_id=7)).bos == 7


def test_a_tokenizer_that_would_cut_and_fill(copy):
  folder = copy(DENSE)
  path = folder / 'tokenizer.json'
  content = json.loads(path.read_text())
  content['truncation'] = dict(
      direction='Right', max_length=4, strategy='LongestFirst', stride=0
  )
  content['padding'] = dict(
      strategy={'Fixed': 500}, direction='Right', pad_to_multiple_of=None,
      pad_id=0, pad_type_id=0, pad_token='x',
  )  # fmt: skip
  path.write_text(json.dumps(content))
  found = huggingface.tokenizer(folder).encode(TEXT)
  assert found == huggingface.tokenizer(DENSE).encode(TEXT)


def test_wrong_tokenizers(copy):
  with pytest.raises(OSError, match='tokenizer.json'):
    huggingface.tokenizer(MOE)
  with pytest.raises(ValueError, match='token 279; allowed are 0 to 278'):
    huggingface.tokenizer(copy(DENSE, vocab_size=279))
  for value in (None, [], 280, True):
    with pytest.raises(ValueError, match='eos_token_id=.*allowed is 0 to 279'):
      huggingface.tokenizer(copy(DENSE, eos_token_id=value))
  with pytest.raises(ValueError, match='surrogates'):
    huggingface.tokenizer(DENSE).encode('a\ud800')
  folder = copy(DENSE)
  (folder / 'tokenizer.json').write_text('{"version": "1.0"}')
  with pytest.raises(ValueError, match='tokenizer.json: '):
    huggingface.tokenizer(folder)


# The command.

SMALL = [
    '--config.rollout.engines=1', '--config.rollout.max_sequences=8',
    '--config.learner.rows=2', '--config.learner.row_tokens=128',
    '--config.policy.max_context=128',
]  # fmt: skip


def mismatch(tmp_path, folder, *words):
  path = tmp_path / 'report.json'
  words = [f'--huggingface={folder}', f'--json={path}', *words]
  code = verify.main(['mismatch', *words])
  return code, json.loads(path.read_text())


def test_mismatch_over_a_text(tmp_path):
  text = tmp_path / 'text.txt'
  text.write_text(TEXT * 2)
  words = [f'--text={text}', '--config.policy.page=8', *SMALL]
  code, report = mismatch(tmp_path, DENSE, *words)
  assert code == 0 and report['verdict'] == 'exact'
  ids = huggingface.tokenizer(DENSE).encode(TEXT * 2)
  assert report['tokens']['origin'] == f'{text}, text of {len(ids)} tokens'
  assert report['positions'] == report['gradient']['positions'] > 50
  assert str(DENSE) in report['policy']['origin']


@pytest.mark.slow
def test_mismatch_beside_its_control(tmp_path):
  """No flag is needed to fit the config to the folder."""
  code, report = mismatch(tmp_path, MOE, '--positions=200', '--control')
  assert code == 0 and report['verdict'] == 'exact'
  assert report['unequal_bits'] == report['route_flips'] == 0
  assert report['positions'] >= 200
  assert report['control']['unequal_bits'] > 0
  policy = report['policy']
  assert (policy['layers'], policy['experts'], policy['vocab']) == (3, 4, 120)
  assert (policy['pattern'], policy['max_context']) == ('f', 128)
  assert report['tokens']['drawn_by_policy']


@pytest.mark.slow
def test_mismatch_against_the_library(tmp_path):
  logs = tmp_path / 'logs.jsonl'
  expected = np.load(MOE / 'expected.npz')
  with open(logs, 'w') as file:
    for tokens, logp in zip(expected['tokens'], expected['logp']):
      line = dict(tokens=tokens.tolist(), logprobs=[None, *logp.tolist()])
      file.write(json.dumps(line) + '\n')
  code, report = mismatch(tmp_path, MOE, f'--against={logs}', *SMALL)
  assert code == 0 and report['verdict'] == 'flat'
  assert report['positions'] == expected['logp'].size
  assert 0 < report['max_abs_dlogp'] < 1e-5


@pytest.mark.slow
def test_fields_that_leave_the_weights(tmp_path):
  words = ['--config.policy.pattern=wb', '--config.policy.precision=bfloat16']
  words += ['--config.policy.window=20', '--positions=50', *SMALL]
  code, report = mismatch(tmp_path, DENSE, *words)
  assert code == 0 and report['verdict'] == 'exact'
  policy = report['policy']
  assert (policy['pattern'], policy['precision']) == ('wb', 'bfloat16')


@pytest.mark.slow
def test_two_precisions(tmp_path):
  path = tmp_path / 'report.json'
  words = [
      f'--huggingface={MOE}', f'--json={path}', '--b=float32', '--context=128',
      '--sequences=2',
  ]  # fmt: skip
  assert verify.main(['precision', *words]) == 0
  report = json.loads(path.read_text())
  assert report['holds'] and 0 < report['kl'] < 0.1


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (['--config.policy.width=64'], ['config.policy.width', 'precision']),
        (['-config.policy.tied=true'], ['config.policy.tied', 'max_context']),
        (
            ['--config.tokenizer.vocab_size=260'],
            ['config.tokenizer.vocab_size', str(MOE)],
        ),
        (['--config.policy.page=0'], ['policy.page=0']),
        (['--config.policy.max_context=72'], ['policy.max_context=72']),
        (['--config.rollout.engines=0'], ['rollout.engines=0']),
        (['--text=/no/such'], ['/no/such']),
    ],
)
def test_bad_input(words, expected, capsys):
  assert verify.main(['mismatch', f'--huggingface={MOE}', *words]) == 2
  message = capsys.readouterr().err
  for word in ('error: ', *expected):
    assert word in message


def test_no_such_folder(capsys):
  assert verify.main(['mismatch', '--huggingface=/no/such']) == 2
  assert '/no/such/config.json' in capsys.readouterr().err
  with pytest.raises(SystemExit):
    verify.main(['mismatch', '--huggingface=a', '--workdir=b'])
