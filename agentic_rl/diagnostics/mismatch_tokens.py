"""The tokens over which sampler and learner are compared.

They come from random traffic that the policy itself draws, from the trajectory
files of a run, or from a text. Of the last two the engine is made to draw the
tokens as they are (`Engine.force`), among others that join and leave.

Log-probs of a foreign engine come as JSON lines, one sequence a line:

  {"tokens": [1, 17, 4, …], "logprobs": [null, -0.25, null, …]}

`logprobs[i]` is the natural logarithm of the probability that the engine gave
to `tokens[i]` after `tokens[:i]`, at the temperature of the config and before
top-k or top-p; null where it is not known, as it is for the first. An optional
`"routes": [[[3, 0], …], …]` names the experts of each token, layer by layer of
those that have experts, in slot order, -1 where they are not known. Other keys
are ignored, and so are empty lines. (A run's own rollouts `rl-00000N` were
drawn by the weights of its checkpoint N - 1.)
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import json
import math
import pathlib
from typing import Any, Sequence

import numpy as np

from agentic_rl.diagnostics import traffic
from agentic_rl.learner import pack as pack_lib
from agentic_rl.policy import huggingface
from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.rollout import journal

# Every so many sequences, one comes a second time, so many places later.
AGAIN, LATER = 4, 160
# Of a text, spans up to so long are drawn one by one; others between them are
# read at once.
DRAWN_SPAN = 64
_LEAST_LOGP = -1e30  # of a foreign engine; what is less is no float32


@dataclasses.dataclass(frozen=True)
class Source:
  """Sequences for the engine.

  Attributes:
    origin: where the tokens come from, for people.
    scripts: what each sequence reads and draws.
    drawn: whether the policy draws them itself; otherwise they are forced.
  """

  origin: str
  scripts: tuple[traffic.Script, ...]
  drawn: bool

  @property
  def positions(self) -> int:
    """Tokens that are drawn, and so compared."""
    return sum(sum(s.draws) for s in self.scripts)


def from_traffic(
    cfg: PolicyConfig, positions: int, seed: int = 0, sequences: int = 1
) -> Source:
  """Returns random traffic of at least so many drawn tokens and sequences.

  Those that share a prompt are spread, so that later ones find its pages.
  """
  scripts: list[traffic.Script] = []
  drawn = 0
  while drawn < positions or len(scripts) < sequences:
    more = traffic.draw_scripts(cfg, 64, seed + len(scripts), len(scripts))
    for script in more:
      if drawn < positions or len(scripts) < sequences:
        scripts.append(script)
        drawn += sum(script.draws)
  order = np.random.default_rng(seed).permutation(len(scripts))
  scripts = [scripts[i] for i in order]
  return Source('random traffic, drawn by the policy', tuple(scripts), True)


def trajectory_files(pattern: str) -> list[pathlib.Path]:
  """Returns the files of a comma list of names and patterns.

  Raises:
    ValueError: nothing has such a name.
  """
  found: list[pathlib.Path] = []
  for part in filter(None, pattern.split(',')):
    names = sorted(glob.glob(part, recursive=True))
    if not names:
      raise ValueError(f'trajectories={part!r}: no such file')
    found.extend(map(pathlib.Path, names))
  return found


def newest_trajectories(workdir: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a run's training rollouts, the newest first."""
  return sorted((workdir / 'trajectories').glob('rl-*.jsonl.gz'), reverse=True)


def from_trajectories(
    files: Sequence[pathlib.Path],
    cfg: PolicyConfig,
    positions: int,
    seed: int = 0,
) -> Source:
  """Returns what was drawn in logged rollouts, in a random order.

  Every fourth comes a second time, later and prompted with its first half, and
  finds the pages of the first, if they were not evicted.

  Args:
    files: read until there are positions enough.
    cfg: the policy that is to score them.
    positions: drawn tokens to be reached, if there are so many.
    seed: of the order.

  Raises:
    ValueError: a file holds no trajectories, or they do not fit the policy.
  """
  found: list[tuple[Any, np.ndarray]] = []
  used, count = 0, 0
  for path in files:
    used += 1
    for number, item in enumerate(_read_journal(path), 1):
      if count >= positions:
        break
      where = f'{path} trajectory {number}'
      _check_tokens(item.tokens, cfg, where)
      drawn = np.array(item.sampled, bool)
      drawn[0] = False  # nothing stands before it
      if drawn.any():
        found.append((item.tokens, drawn))
        count += int(drawn.sum())
        if len(found) % AGAIN == 1:
          count += int(_second_half(drawn).sum())
    if count >= positions:
      break
  if not found:
    raise ValueError(f'{files[0]}: no drawn token in {len(files)} files')
  order = np.random.default_rng(seed).permutation(len(found))
  # The first, fifth, ... come again, wherever they stand.
  scripts = _scripts([(*found[i], i % AGAIN == 0) for i in order.tolist()])
  name = files[0] if used == 1 else f'{used} files from {files[0]}'
  origin = f'logged trajectories, {name}'
  return Source(origin, scripts, False)


def _read_journal(path: pathlib.Path):
  try:
    yield from journal.read(path)
  except (OSError, EOFError) as error:
    raise ValueError(f'{path}: no trajectory file ({error})') from error


def from_text(
    text: str,
    tokenizer: tokenizer_lib.Tokenizer | huggingface.Tokenizer,
    cfg: PolicyConfig,
    positions: int,
    seed: int = 0,
) -> Source:
  """Cuts a text into sequences of a whole context.

  Spans of random length are drawn, with shorter ones between them that are
  read, as an agent reads answers. Every fourth sequence comes a second time,
  later and prompted with its first half, and finds the pages of the first.

  Args:
    text: any, two tokens or more.
    tokenizer: of the policy.
    cfg: for the context.
    positions: drawn tokens after which the rest of the text is left out.
    seed: of the spans.

  Raises:
    ValueError: the text is too short.
  """
  ids = tokenizer.encode(text)
  rng = np.random.default_rng(seed)
  size = cfg.max_context - 1
  found: list[tuple[Any, np.ndarray, bool]] = []
  count = 0
  for number, low in enumerate(range(0, len(ids), size)):
    tokens = np.asarray([tokenizer.bos, *ids[low : low + size]], np.int32)
    first = int(rng.integers(1, max(2, len(tokens) // 4)))
    drawn = _spans(rng, len(tokens), first, cfg.page)
    if drawn.any() and count < positions:
      again = number % AGAIN == 0
      found.append((tokens, drawn, again))
      count += int(drawn.sum())
      count += int(_second_half(drawn).sum()) if again else 0
  if not found:
    raise ValueError(f'text of {len(ids)} tokens: 2 or more are needed')
  scripts = _scripts(found)
  return Source(f'text of {len(ids)} tokens', scripts, False)


def _second_half(drawn: np.ndarray) -> np.ndarray:
  """Returns the same, but nothing drawn in the first half of the draws."""
  places = np.flatnonzero(drawn)
  later = drawn.copy()
  later[: places[len(places) // 2]] = False
  return later


def _scripts(found) -> tuple[traffic.Script, ...]:
  """Returns scripts that draw what is marked, some of them twice.

  Args:
    found: tokens, which of them are drawn, and whether they come again.
  """
  due: collections.deque[tuple[int, Any, np.ndarray]] = collections.deque()
  order = []
  for place, (tokens, drawn, again) in enumerate(found):
    while due and due[0][0] <= place:
      order.append(due.popleft()[1:])
    order.append((tokens, drawn))
    if again:
      due.append((place + LATER, tokens, _second_half(drawn)))
  order += [item[1:] for item in due]
  return tuple(_forced(i, *item) for i, item in enumerate(order))


def _spans(rng, count: int, at: int, page: int) -> np.ndarray:
  """Returns bool [count]: which tokens are drawn."""
  drawn = np.zeros(count, bool)
  while at < count:
    length = int(rng.integers(1, DRAWN_SPAN + 1))
    drawn[at : at + length] = True
    at += length + int(rng.integers(1, page + 1))
  return drawn


def _forced(number: int, tokens, sampled: np.ndarray) -> traffic.Script:
  """Returns a script that draws exactly these tokens, at least one."""
  changes = np.flatnonzero(np.diff(sampled.astype(np.int8), append=0))
  edges = (changes + 1).tolist()  # starts and ends in turn
  ids = [int(t) for t in tokens]
  starts, ends = edges[::2], edges[1::2]
  return traffic.Script(
      rollout_id=number,
      prompt=tuple(ids[: starts[0]]),
      draws=tuple(b - a for a, b in zip(starts, ends)),
      observations=tuple(
          tuple(ids[b:a]) for b, a in zip(ends[:-1], starts[1:])
      ),
      wait=number % 3,
      forced=tuple(t for a, b in zip(starts, ends) for t in ids[a:b]),
  )


def again(script: traffic.Script, played: traffic.Played) -> traffic.Script:
  """Returns the script that draws what was drawn."""
  drawn = played.tokens[played.sampled]
  return dataclasses.replace(script, forced=tuple(drawn.tolist()))


def _check_tokens(tokens, cfg: PolicyConfig, where: str) -> None:
  if not 2 <= len(tokens) <= cfg.max_context:
    raise ValueError(
        f'{where}: {len(tokens)} tokens; allowed are 2 to'
        f' policy.max_context={cfg.max_context}'
    )
  for token in (min(tokens), max(tokens)):
    if not 0 <= token < cfg.vocab:
      raise ValueError(
          f'{where}: token {token}; allowed are 0 to {cfg.vocab - 1}, the'
          " policy's vocabulary"
      )


# ------------------------------------------------------------- foreign engines


def read_foreign(
    path: str | pathlib.Path, cfg: PolicyConfig
) -> list[pack_lib.Example]:
  """Reads the log-probs of a foreign engine (format: see the module).

  Args:
    path: a file of JSON lines.
    cfg: the policy that is to score the same tokens.

  Returns:
    An example a line; `sampled` marks the tokens whose log-prob is known.

  Raises:
    ValueError: a line is malformed (file and line are named), or no log-prob
      is known.
    OSError: the file can not be read.
  """
  examples = []
  with open(path, encoding='utf-8', errors='replace') as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        try:
          examples.append(_foreign(json.loads(line), cfg))
        except (ValueError, OverflowError, RecursionError) as error:
          raise ValueError(f'{path} line {number}: {error}') from None
  if not any(e.sampled.any() for e in examples):
    raise ValueError(f'{path}: no log-prob is known in {len(examples)} lines')
  return examples


def _foreign(line: Any, cfg: PolicyConfig) -> pack_lib.Example:
  if not isinstance(line, dict) or not {'tokens', 'logprobs'} <= line.keys():
    raise ValueError("no object with the keys 'tokens' and 'logprobs'")
  tokens, logprobs = line['tokens'], line['logprobs']
  if not isinstance(tokens, list) or any(type(t) is not int for t in tokens):
    raise ValueError("'tokens' must be a list of integers")
  _check_tokens(tokens, cfg, "'tokens'")
  if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
    raise ValueError(f"'logprobs' must be a list of {len(tokens)}, as 'tokens'")
  for i, value in enumerate(logprobs):
    known = type(value) in (int, float) and math.isfinite(value)
    # Rounding may lift the log-prob of a sure token above zero.
    if value is not None and not (known and _LEAST_LOGP < value < 1e-3):
      raise ValueError(
          f"'logprobs'[{i}] is {value!r}; allowed are null and numbers from"
          f' {_LEAST_LOGP} to 0'
      )
  if logprobs[0] is not None:
    raise ValueError("'logprobs'[0] must be null: nothing stands before it")
  sampled = np.array([v is not None for v in logprobs])
  return pack_lib.Example(
      tokens=np.asarray(tokens, np.int32),
      weights=sampled.astype(np.float32),
      advantages=np.zeros(len(tokens), np.float32),
      logp_behavior=np.asarray([v or 0.0 for v in logprobs], np.float32),
      sampled=sampled,
      routes=_foreign_routes(line.get('routes'), len(tokens), cfg),
  )


def _foreign_routes(value: Any, count: int, cfg: PolicyConfig):
  if value is None:
    return None
  shape = (count, cfg.moe_layers, cfg.topk_experts)
  try:
    routes = np.asarray(value)
  except ValueError:  # lists of several lengths
    routes = np.zeros(0)
  if not cfg.moe_layers or routes.shape != shape or routes.dtype.kind != 'i':
    raise ValueError(
        f"'routes' must be integers of shape {list(shape)}: tokens, layers with"
        ' experts, slots'
    )
  for expert in (routes.min(), routes.max()):
    if not -1 <= expert < cfg.experts:
      raise ValueError(
          f"'routes' holds {expert}; allowed are -1 to {cfg.experts - 1}"
      )
  return routes.astype(np.int16)
