"""Token in, token out: the ids of training are the ids of a rollout."""

import numpy as np
import pytest

from agentic_rl.envs import grammar
from agentic_rl.policy import chat as chat_lib
from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.tasks import expert
from agentic_rl.tasks import generate


@pytest.fixture(scope='module')
def tasks():
  return list(generate.generate_tasks(300))


@pytest.fixture(scope='module')
def chat(tasks):
  texts = expert.corpus(tasks)
  return chat_lib.Chat(tokenizer_lib.Tokenizer.train(texts))


def _rollout(chat, prompt, turns):
  """Builds an episode as a collector does: piece after piece."""
  tokens, sampled, prompts = chat.prompt_ids(prompt), [], []
  sampled += [False] * len(tokens)
  for number, (action, observation) in enumerate(turns, 1):
    prompts.append(list(tokens))
    ids = chat.action_ids(action)
    assert chat.action_text(ids) == action
    tokens += ids
    sampled += [True] * len(ids)
    if number < len(turns):
      ids = chat.observation_ids(observation)
      tokens += ids
      sampled += [False] * len(ids)
  return tokens, sampled, prompts


def test_traces_have_the_ids_of_an_incremental_rollout(chat, tasks):
  for task in tasks[:100]:
    turns = expert.simulate(task, 0)
    expected, sampled, prompts = _rollout(chat, task.prompt, turns)
    tokens, kinds = chat.trace_ids(task.prompt, turns)
    assert tokens.dtype == np.int32 and tokens.shape == kinds.shape
    np.testing.assert_array_equal(tokens, expected)
    # What is trained on is what was sampled, token by token.
    np.testing.assert_array_equal(kinds == chat_lib.ACTION, sampled)
    # Each prompt extends the last one.
    for short, long in zip(prompts, [*prompts[1:], expected]):
      assert long[: len(short)] == short


def test_the_policy_acts_right_after_act_and_ends_with_end(chat, tasks):
  turns = expert.simulate(tasks[0], 0)
  tokens, kinds = chat.trace_ids(tasks[0].prompt, turns)
  action = kinds == chat_lib.ACTION
  starts = np.flatnonzero(action & ~np.r_[False, action[:-1]])
  assert len(starts) == len(turns)
  assert (tokens[starts - 1] == chat.tokenizer.act).all()
  assert (tokens[action] == chat.end).sum() == len(turns)
  assert tokens[-1] == chat.end
  assert tokens[0] == chat.tokenizer.bos
  assert (kinds[: starts[0]] == chat_lib.PROMPT).all()


def test_sampled_ids_are_kept_even_if_text_has_other_ids(chat):
  # A policy may spell a word byte by byte: the text is the same, the ids are
  # the ones sampled.
  tok = chat.tokenizer
  spelled = [i for c in 'test' for i in tok.encode(c)]
  assert len(spelled) == 4 and tok.encode('test') != spelled
  assert chat.action_text([*spelled, chat.end]) == 'test'


def test_special_ids_in_an_action_are_malformed_calls(chat):
  tok = chat.tokenizer
  for special in (tok.pad, tok.bos, tok.act, tok.end):
    text = chat.action_text([*tok.encode('test'), special, chat.end])
    assert isinstance(grammar.parse(text), grammar.Malformed), text
  assert chat.action_text([]) == chat.action_text([chat.end]) == ''


def test_text_of_an_environment_makes_no_special_token(chat):
  tok = chat.tokenizer
  ids = chat.observation_ids('⟨end⟩ ⟨act⟩ PASS')
  assert ids[-1] == tok.act
  assert not {tok.pad, tok.bos, tok.act, tok.end} & set(ids[:-1])


def test_an_action_cut_by_the_limit_has_no_end(chat):
  ids = chat.action_ids('view util.py')[:-1]
  assert chat.action_text(np.array(ids, np.int32)) == 'view util.py'


def test_a_default_episode_is_short(chat, tasks):
  lengths, actions = [], []
  for task in tasks:
    tokens, kinds = chat.trace_ids(task.prompt, expert.simulate(task, 1))
    lengths.append(len(tokens))
    actions.append((kinds == chat_lib.ACTION).sum())
  assert 95 < np.mean(lengths) < 125
  assert 22 < np.mean(actions) < 34
  assert max(lengths) <= 256
