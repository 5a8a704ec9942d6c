"""The token-level format of an episode, for training and evaluation alike.

  BOS prompt ACT | action END | observation ACT | action END | ...

Tokens in, tokens out: an episode is the sequence of the ids that were sampled
and observed. Every piece is turned into ids once, alone; nothing is rendered
and tokenised again, so each prompt of the policy extends the last one.
"""

from __future__ import annotations

from typing import Iterable, Sequence

import numpy as np

from agentic_rl.policy import tokenizer as tokenizer_lib

# What a token of `trace_ids` is.
PROMPT, ACTION, OBSERVATION = 0, 1, 2


class Chat:
  """Builds the parts of an episode.

  Attributes:
    tokenizer: the vocabulary.
    end: the id that ends an action; the policy samples it.
  """

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self.tokenizer = tokenizer
    self.end = tokenizer.end

  def prompt_ids(self, prompt: str) -> list[int]:
    """Returns the first ids; the next sampled token begins an action."""
    t = self.tokenizer
    return [t.bos, *t.encode(prompt), t.act]

  def observation_ids(self, text: str) -> list[int]:
    """Returns the ids after an action; the next sampled token begins one."""
    t = self.tokenizer
    return [*t.encode(text), t.act]

  def action_ids(self, text: str) -> list[int]:
    """Returns the ids of a scripted action, END included."""
    return [*self.tokenizer.encode(text), self.end]

  def action_text(self, ids: Sequence[int]) -> str:
    """Returns what the environment reads of sampled ids.

    A trailing END is left out. Any other special id shows as ⟨name⟩, which no
    environment accepts as a call.
    """
    ids = [int(i) for i in ids]
    if ids and ids[-1] == self.end:
      ids = ids[:-1]
    return self.tokenizer.decode(ids)

  def trace_ids(
      self, prompt: str, turns: Iterable[tuple[str, str]]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a scripted episode, for supervised training.

    Args:
      prompt: what the agent reads first.
      turns: (action, observation) texts; the observation after the last action
        is left out, as in a rollout.

    Returns:
      tokens int32 [T], and kinds int8 [T]: PROMPT, ACTION or OBSERVATION.
    """
    turns = list(turns)
    parts = [(PROMPT, self.prompt_ids(prompt))]
    for number, (action, observation) in enumerate(turns, 1):
      parts.append((ACTION, self.action_ids(action)))
      if number < len(turns):
        parts.append((OBSERVATION, self.observation_ids(observation)))
    tokens = np.array([i for _, ids in parts for i in ids], np.int32)
    kinds = np.repeat(
        np.array([kind for kind, _ in parts], np.int8),
        [len(ids) for _, ids in parts],
    )
    return tokens, kinds
