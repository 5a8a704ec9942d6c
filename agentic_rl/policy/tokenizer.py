"""A small byte-exact tokenizer, on Hugging Face `tokenizers`.

The pre-tokenizer isolates names, numbers and operators, and gives every space
to the operator or keyword beside it. So a name or a line number has one form,
hence one id, in a file view, in a test's failure and in an edit, and the
policy can copy it.

The model is byte-level BPE over these pieces. A piece that is in the
vocabulary is one token; only pieces that found no room are built from merges.
Any text round-trips exactly, and no text can make a special token: specials
are ids that only `chat` puts into a sequence.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
from typing import Iterable, Sequence

import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from agentic_rl import types

FORMAT = 1
SPECIALS = ('pad', 'bos', 'act', 'end')
_KEYWORDS = (
    'return|def|if|else|elif|for|in|while|and|or|not|import|from|'
    'view|edit|FAIL|got|want'
)
# The order matters: the first alternative that matches wins.
PIECES = '|'.join(
    [
        r'\w+\.py\b',  # a file
        rf'\)? *\b(?:{_KEYWORDS})\b(?!\() ?',  # a keyword with its spaces
        r'(?<!\d)\d{1,2}(?!\d)|\d',  # numbers up to 99 whole, longer by digits
        r'\w+',  # a name
        r' ?(?:[-+*/%<>=!]+|#) ?',  # an operator with its spaces
        r'[)\]}:,]+(?: |\n)?',  # closers, up to the end of the line
        r'\n| +|[^\w\s]|\s',
    ]
)


class Tokenizer:
  """Turns text into ids and back.

  Attributes:
    pad: id of padding, 0.
    bos: id that begins a sequence.
    act: id after which the policy acts.
    end: id that ends an action.
    vocab_size: number of ids.
    version: content hash of vocabulary, merges and pieces.
  """

  pad, bos, act, end = range(len(SPECIALS))

  def __init__(self, tokens: Sequence[str], merges: Sequence[Sequence[str]]):
    """Builds it from what `train` learnt, see `load`.

    Args:
      tokens: byte-level texts by id, after the specials.
      merges: pairs of tokens, in order.
    """
    self._tokens = tuple(tokens)
    self._merges = tuple((a, b) for a, b in merges)
    names = [f'⟨{s}⟩' for s in SPECIALS]  # outside the byte-level alphabet
    vocab = {t: n for n, t in enumerate([*names, *self._tokens])}
    if len(vocab) != len(names) + len(self._tokens):
      raise ValueError('vocabulary has a token twice; allowed: once each')
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys()
    if missing:
      raise ValueError(
          f'vocabulary lacks {len(missing)} bytes; allowed: all 256'
      )
    self._model = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=list(self._merges), ignore_merges=True)
    )
    self._model.pre_tokenizer = _pre_tokenizer()
    self._bytes = [s.encode() for s in names] + [
        bytes(_BYTE_OF[c] for c in t) for t in self._tokens
    ]
    self.vocab_size = len(vocab)
    self.version = types.content_hash(self._content())

  @classmethod
  def train(cls, texts: Iterable[str], vocab_size: int = 512) -> Tokenizer:
    """Learns a vocabulary. Deterministic in the texts, whatever their order.

    All pieces of two bytes or more become tokens if there is room for them.
    Otherwise the most frequent do, and up to a quarter of the room goes to
    merges that build the rest.

    Args:
      texts: what an episode can show.
      vocab_size: most ids, at least 4 specials + 256 bytes.

    Raises:
      ValueError: `vocab_size` is too small, or there are no texts.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(SPECIALS) + len(alphabet)
    if vocab_size < least:
      raise ValueError(
          f'vocab_size is {vocab_size!r}; allowed: at least {least}'
      )
    split = _pre_tokenizer().pre_tokenize_str
    counts: collections.Counter[str] = collections.Counter()
    for text, times in collections.Counter(texts).items():
      for piece, _ in split(text):
        counts[piece] += times
    if not counts:
      raise ValueError('texts are empty; allowed: at least one text')
    ranked = sorted(
        (p for p in counts if len(p) > 1), key=lambda p: (-counts[p], p)
    )
    room = vocab_size - least
    excess = max(0, len(ranked) - room)
    whole = ranked[: room - min(2 * excess, room // 4)]
    rest = ranked[len(whole) :]
    merges: list[tuple[str, str]] = []
    if rest:
      merges = _learn_merges(rest, counts, alphabet, room - len(whole))
    known = set(whole) | set(alphabet)
    made = [m for m in (a + b for a, b in merges) if m not in known]
    return cls([*alphabet, *whole, *dict.fromkeys(made)], merges)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text; never a special id.

    Raises:
      ValueError: the text has a lone surrogate, so it has no UTF-8.
    """
    try:
      return self._model.encode(text, add_special_tokens=False).ids
    except TypeError:
      _require_utf8(text)
      raise

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of ids: the inverse of `encode`.

    Special ids show as ⟨name⟩; ids that are no UTF-8 together show U+FFFD.
    """
    return b''.join(self._bytes[i] for i in ids).decode('utf-8', 'replace')

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a JSON file, atomically."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{os.getpid()}.partial')
    content = {**self._content(), 'version': self.version}
    partial.write_text(json.dumps(content, indent=0), encoding='utf-8')
    os.replace(partial, path)

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
    """Reads a file of `save`.

    Raises:
      ValueError: the file is damaged or of another format.
    """
    try:
      content = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
      found = content.pop('version')
      format_, pieces = content['format'], content['pieces']
      tokens, merges = content['tokens'], content['merges']
    except (KeyError, TypeError, AttributeError, ValueError) as error:
      raise ValueError(f'{path} is no tokenizer file: {error!r}') from None
    if (format_, pieces) != (FORMAT, PIECES):
      raise ValueError(
          f'{path} has format {format_!r} or other pieces; allowed: {FORMAT} '
          'and the pieces of this version'
      )
    tokenizer = cls(tokens, merges)
    if tokenizer.version != found:
      raise ValueError(
          f'{path} is damaged: its version is {found!r}, its content hashes to '
          f'{tokenizer.version!r}'
      )
    return tokenizer

  def _content(self) -> dict:
    return {
        'format': FORMAT,
        'specials': list(SPECIALS),
        'pieces': PIECES,
        'tokens': list(self._tokens),
        'merges': [list(m) for m in self._merges],
    }


def _require_utf8(text: str) -> None:
  try:
    text.encode()
  except UnicodeEncodeError as error:
    at = text[error.start]
    raise ValueError(
        f'text has {at!r} at {error.start}; allowed: text with a UTF-8 form'
    ) from None


def _byte_of() -> dict[str, int]:
  """Returns the byte that each letter of the byte-level alphabet stands for.

  Printable bytes stand for themselves, the others for the letters from U+0100.
  """
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  out = {chr(b): b for b in shown}
  hidden = (b for b in range(256) if b not in shown)
  return out | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTE_OF = _byte_of()


def _pre_tokenizer():
  return pre_tokenizers.Sequence(
      [
          pre_tokenizers.Split(tokenizers.Regex(PIECES), 'isolated'),
          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
  )


def _learn_merges(pieces, counts, alphabet, room) -> list[tuple[str, str]]:
  """Learns merges, at most `room`, from the pieces with their counts."""
  model = tokenizers.Tokenizer(models.BPE())
  trainer = trainers.BpeTrainer(
      vocab_size=len(alphabet) + room,
      initial_alphabet=alphabet,
      show_progress=False,
  )
  # The trainer breaks ties by the order in which it first sees a pair.
  model.train_from_iterator(
      (p for p in sorted(pieces) for _ in range(counts[p])), trainer
  )
  merges = json.loads(model.to_str())['model']['merges']
  return [(a, b) for a, b in merges]
