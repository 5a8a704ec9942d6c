"""Exact round trips, one form of names and numbers, determinism."""

import json
import random

import pytest

from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.tasks import expert
from agentic_rl.tasks import generate
from agentic_rl.tasks import templates

Tokenizer = tokenizer_lib.Tokenizer


@pytest.fixture(scope='module')
def texts():
  return list(expert.corpus(generate.generate_tasks(400)))


@pytest.fixture(scope='module')
def tok(texts):
  return Tokenizer.train(texts)


@pytest.mark.parametrize(
    'text',
    [
        '',
        ' ',
        '\n\n  \t x',
        'a\r\nb\x00c\x7f',
        'naïve “quotes” 日本 🙂 e\u0301',
        '\u2028\x85\ufffd\ufeff',
        'if a>=b :return  -3//x==y',
        '1 12 123 1234 0007 3.14 x2 2x',
        '⟨act⟩⟨end⟩ <|endoftext|> </s> [PAD] act end',
        'ĠĊ Ā',
        'def\tf( a,b ):',
    ],
)
def test_any_text_round_trips(tok, text):
  ids = tok.encode(text)
  assert tok.decode(ids) == text
  assert all(i >= len(tokenizer_lib.SPECIALS) for i in ids)


def test_random_text_round_trips(tok):
  rng = random.Random(0)
  for _ in range(300):
    text = ''.join(
        chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)]))
        for _ in range(rng.randrange(40))
    )
    assert tok.decode(tok.encode(text)) == text


def test_episode_text_round_trips(tok):
  for task in generate.generate_tasks(50, 'heldout', 'hard'):
    for pair in expert.simulate(task, 0):
      for text in pair:
        assert tok.decode(tok.encode(text)) == text


def test_names_and_numbers_have_one_id_everywhere(tok):
  places = [
      '{n}',
      '4 def {n}(a):',
      'FAIL util.py 2 {n}(4) got 0 want 8',
      '  return {n}(a) + 3',
      'edit util.py 3 x = {n}',
  ]
  for name in [*templates.FUNCTION_NAMES, *templates.VARIABLE_NAMES]:
    (only,) = tok.encode(name)
    assert all(only in tok.encode(p.format(n=name)) for p in places), name
  for module in templates.MODULE_NAMES:
    (file,) = tok.encode(f'{module}.py')
    for text in ('view {f}', 'FAIL {f} 2 x(4) got 0 want 8', 'x.py {f}'):
      assert file in tok.encode(text.format(f=f'{module}.py'))
  for number in range(100):
    (only,) = tok.encode(str(number))
    for text in (
        'edit x.py {n} return a',
        'a + {n}\n',
        '\n{n} # a',
        '({n}, 2)',
        'FAIL x.py {n} stem(4) got 0 want 8',
    ):
      assert only in tok.encode(text.format(n=number)), (number, text)


def test_long_numbers_are_digits(tok):
  assert tok.encode('105') == [i for d in '105' for i in tok.encode(d)]


def test_episodes_are_made_of_whole_pieces(tok, texts):
  # An action of the grammar costs as many tokens as it has parts.
  shown = [tok.decode([i]) for i in tok.encode('edit util.py 4 return x + 3')]
  assert shown == ['edit ', 'util.py', ' ', '4', ' return ', 'x', ' + ', '3']
  assert len(tok.encode('test')) == len(tok.encode('submit')) == 1
  # No letters are spelled byte by byte.
  multi = [t for t in texts if any(len(w) > 1 for w in t.split())]
  for text in multi[:2000]:
    pieces = [tok.decode([i]) for i in tok.encode(text)]
    assert not any(
        a.isalpha() and b.isalpha() for a, b in zip(pieces, pieces[1:])
    ), text


def test_the_vocabulary_is_small_and_saturates(texts):
  tok = Tokenizer.train(texts)
  assert tok.vocab_size <= 512
  assert Tokenizer.train(texts, 2048).version == tok.version


def test_training_is_deterministic_whatever_the_order(texts, tok):
  shuffled = list(texts)
  random.Random(1).shuffle(shuffled)
  again = Tokenizer.train(shuffled)
  assert again.version == tok.version
  for size in (300, 400):
    small = Tokenizer.train(texts, size)
    assert small.vocab_size <= size
    assert small.version == Tokenizer.train(shuffled, size).version
    assert small.version != tok.version
    for text in texts[:500]:
      assert small.decode(small.encode(text)) == text


def test_a_tight_vocabulary_builds_the_rest_from_merges(texts):
  rare = [*texts, *(f'zyxwvu{n:03}abc' for n in range(400))]
  tok = Tokenizer.train(rare, 512)
  assert tok.vocab_size <= 512
  ids = tok.encode('zyxwvu999abc')
  assert len(ids) < 12
  assert tok.decode(ids) == 'zyxwvu999abc'


def test_special_ids_are_first_and_show_as_names(tok):
  assert (tok.pad, tok.bos, tok.act, tok.end) == (0, 1, 2, 3)
  assert tok.decode([tok.act, *tok.encode('x'), tok.end]) == '⟨act⟩x⟨end⟩'


def test_ids_without_a_text_decode_without_an_error(tok):
  half = tok.encode('é')[:1]
  assert tok.decode(half) == '\ufffd'


def test_saving_and_loading(tok, tmp_path):
  path = tmp_path / 'new' / 'tokenizer.json'
  tok.save(path)
  loaded = Tokenizer.load(path)
  assert loaded.version == tok.version
  assert loaded.vocab_size == tok.vocab_size
  text = 'FAIL util.py 2 stem(4) got 0 want 8'
  assert loaded.encode(text) == tok.encode(text)
  assert [p.name for p in path.parent.iterdir()] == ['tokenizer.json']


def test_a_damaged_file_is_an_error(tok, tmp_path):
  path = tmp_path / 'tokenizer.json'
  tok.save(path)
  content = json.loads(path.read_text())
  content['tokens'][-1], content['tokens'][-2] = content['tokens'][-2:]
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match='is damaged: its version is'):
    Tokenizer.load(path)
  path.write_text(json.dumps({**content, 'format': 9}))
  with pytest.raises(ValueError, match='has format 9'):
    Tokenizer.load(path)
  path.write_text('[]')
  with pytest.raises(ValueError, match='is no tokenizer file'):
    Tokenizer.load(path)


def test_bad_inputs_are_named(tok):
  with pytest.raises(ValueError, match='vocab_size is 100; allowed: at least'):
    Tokenizer.train(['x'], 100)
  with pytest.raises(ValueError, match='texts are empty'):
    Tokenizer.train([])
  with pytest.raises(ValueError, match=r"'\\ud800' at 1; allowed"):
    tok.encode('a\ud800')
  with pytest.raises(ValueError, match='vocabulary has a token twice'):
    Tokenizer(['a', 'a'], [])
  with pytest.raises(ValueError, match='vocabulary lacks 255 bytes'):
    Tokenizer(['a'], [])
