import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl import types
from agentic_rl.envs import pool as pool_lib
from agentic_rl.envs import protocol
from agentic_rl.policy import chat as chat_lib
from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.rollout import collect
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.tasks import expert
from agentic_rl.tasks import generate
from tests.rollout import samples

Status = types.Status
GUESS = types.Task.create('forkme', 'flux.py port.py', {'low': 1, 'high': 9})
WIDE = types.Task.create('forkme', 'node.py', {'low': 1, 'high': 99})
BROKEN = types.Task.create('forkme', 'flux.py', {'low': 1})
LIMITS = collect.Limits(action_tokens=6)


class ScriptedEngine(engine_lib.Engine):
  """The engine, except that the tokens of some rollouts are given.

  The policy runs and its draws are recorded; only their ids are replaced, as
  if the policy had drawn them.
  """

  script: dict[int, list[int]] = {}

  def generate(self):
    out = []
    for item in super().generate():
      seq = self._sequence(item.slot)
      left = self.script.get(seq.rollout_id)
      if left:
        seq.tokens[-1] = left.pop(0)
        item = dataclasses.replace(item, token=seq.tokens[-1])
      out.append(item)
    return out


@functools.cache
def world():
  """The tasks, the chat, the policy and its weights."""
  tasks = list(generate.generate_tasks(100, 'train', 'default'))
  tokenizer = tokenizer_lib.Tokenizer.train(expert.corpus(tasks), 512)
  cfg = samples.config(
      vocab=tokenizer.vocab_size, layers=2, page=16, max_context=256
  )
  weights = samples.weights(cfg)
  # A policy that ends its actions now and then.
  head = np.array(weights['head'])
  head[:, tokenizer.end] *= 3
  weights['head'] = jnp.asarray(head)
  return tasks, chat_lib.Chat(tokenizer), cfg, weights


def make_engine(max_sequences=4, script=None):
  _, _, cfg, weights = world()
  engine = ScriptedEngine(
      cfg, 5, max_sequences=max_sequences, steps=((64, 16),)
  )
  engine.script = {k: list(v) for k, v in (script or {}).items()}
  engine.load_params(weights, 7)
  return engine


def run(pool, requests, *, engine=None, limits=LIMITS, progress=None):
  chat = world()[1]
  collector = collect.Collector(engine or make_engine(), pool, chat, limits)
  extra = () if progress is None else (progress,)
  return collector.collect(requests, *extra)


def requests_for(*tasks, group=3, first=0):
  return collect.group_requests(tasks, group, first, 11)


def guess_pool(**options):
  return pool_lib.EnvPool('forkme', options, workers=2)


@pytest.fixture(scope='module')
def pool():
  with guess_pool(max_turns=3) as made:
    yield made


@pytest.fixture(scope='module')
def collected(pool):
  """Nine random rollouts over four slots, and the metrics."""
  return run(pool, requests_for(GUESS, WIDE, GUESS))


def pieces(t, prompt):
  """Asserts that a trajectory is its pieces' ids, one after the other."""
  chat = world()[1]
  at = len(chat.prompt_ids(prompt))
  assert t.tokens[:at].tolist() == chat.prompt_ids(prompt)
  sampled = np.zeros(len(t.tokens), bool)
  for number, turn in enumerate(t.turns, 1):
    action = turn.action
    assert action.start == at < action.end == turn.obs_start <= turn.obs_end
    ids = t.tokens[action.start : action.end]
    assert action.text == chat.action_text(ids)
    sampled[action.start : action.end] = True
    seen = t.tokens[turn.obs_start : turn.obs_end].tolist()
    if number < len(t.turns):
      assert seen == chat.observation_ids(turn.observation)
    elif t.status is not Status.TIME_LIMIT:
      assert seen == []
    at = turn.obs_end
  assert at == len(t.tokens)
  # Case 14: trained on is what the policy drew, token by token.
  np.testing.assert_array_equal(t.sampled, sampled)
  assert (t.logp_behavior[sampled] < 0).all()
  assert (t.logp_behavior[~sampled] == 0).all()
  assert t.tokens.dtype == np.int32 and t.logp_behavior.dtype == np.float32
  assert t.routes.shape == (len(t.tokens), 2, 2)
  assert (t.routes[:-1] >= 0).all()
  assert (t.routes[-1] == -1).all()


def assert_equal(a, b):
  """Fails unless two trajectories are the same but for the clock."""
  for field in dataclasses.fields(types.Trajectory):
    one, two = getattr(a, field.name), getattr(b, field.name)
    if isinstance(one, np.ndarray):
      assert one.tobytes() == two.tobytes() and one.dtype == two.dtype
    elif field.name == 'info':
      assert one['solved'] == two['solved']
    else:
      assert one == two, field.name


# --- tokens ---


def test_token_in_token_out(collected):
  """Case 13: the trajectory is the sampled and observed ids, as they were."""
  chat, other = world()[1], 0
  for t, task in zip(collected[0], [GUESS] * 3 + [WIDE] * 3 + [GUESS] * 3):
    assert (t.task_id, t.seed, t.weight_version) == (task.task_id, 11, 7)
    pieces(t, task.prompt)
    for turn in t.turns:
      ids = t.tokens[turn.action.start : turn.action.end].tolist()
      assert len(ids) <= LIMITS.action_tokens
      assert chat.end not in ids[:-1]
      assert len(ids) == LIMITS.action_tokens or ids[-1] == chat.end
      other += chat.action_ids(turn.action.text) != ids
  assert other > 9  # tokenising the text again would have changed these


def test_order_states_and_rewards(collected):
  trajectories, metrics = collected
  assert [t.rollout_id for t in trajectories] == list(range(9))
  for t in trajectories:
    assert t.status is Status.TURN_LIMIT and t.reward == 0
    assert len(t.turns) == 3
    assert not any(turn.action.name for turn in t.turns)
    np.testing.assert_allclose(t.total_reward, -0.15)
    assert len({turn.state for turn in t.turns}) == 3
  first = {t.turns[0].state for t in trajectories[:3]}
  assert len(first) == 1  # one state, three rollouts
  assert len({t.tokens.tobytes() for t in trajectories[:3]}) == 3
  assert metrics['status/turn_limit'] == 1
  assert metrics['rollout/malformed_share'] == 1
  assert metrics['rollout/turns'] == 3
  drawn = sum(t.sampled.sum() for t in trajectories)
  assert metrics['rollout/sampled_tokens'] == drawn
  np.testing.assert_allclose(metrics['rollout/reward'], -0.15)


def test_order_and_slots_change_nothing(pool, collected):
  wanted = requests_for(GUESS, WIDE, GUESS)
  one_by_one = make_engine(4)
  for request, expected in zip(wanted[:3], collected[0]):
    assert_equal(run(pool, [request], engine=one_by_one)[0][0], expected)
  backwards, _ = run(pool, wanted[::-1], engine=make_engine(9))
  for a, b in zip(backwards[::-1], collected[0]):
    assert_equal(a, b)


def test_no_two_requests_of_one_id(pool):
  with pytest.raises(ValueError, match='share a rollout_id'):
    run(pool, requests_for(GUESS) + requests_for(WIDE))


def test_nothing_to_collect(pool):
  trajectories, metrics = run(pool, [])
  assert trajectories == [] and metrics['rollout/turns'] == 0


def test_progress_counts_up(pool):
  seen = []
  run(pool, requests_for(GUESS), progress=lambda *pair: seen.append(pair))
  assert [total for _, total in seen] == [3] * len(seen)
  done = [n for n, _ in seen]
  assert done == sorted(set(done)) and done[-1] == 3


@pytest.mark.parametrize(
    'options', [dict(action_tokens=0), dict(deadline_s=0.0)]
)
def test_bad_limits(options):
  with pytest.raises(ValueError, match='must be positive'):
    collect.Limits(**options)


# --- how a rollout ends (case 17) ---


def guesses(*actions):
  return [i for a in actions for i in world()[1].action_ids(a)]


def test_submitted_and_rewarded(pool):
  """A scripted policy finds the number; another says nonsense first."""
  script = {
      0: guesses(*(f'guess {n}' for n in (7, 8, 9))),
      1: guesses('guess', 'guess 1 2', 'guess 5'),
  }
  results = {}
  for seed in range(9):  # the seed draws the number
    engine = make_engine(script=script)
    request = [collect.Request(i, GUESS, seed) for i in (0, 1)]
    limits = collect.Limits(action_tokens=16)
    (a, b), _ = run(pool, request, engine=engine, limits=limits)
    pieces(a, GUESS.prompt)
    pieces(b, GUESS.prompt)
    results[a.status] = a
    results[len(a.turns), b.turns[0].action.valid] = b
  solved = results[Status.SUBMITTED]
  assert solved.reward == 1 and solved.info['solved']
  assert solved.turns[-1].observation == 'right'
  assert [t.action.name for t in solved.turns] == ['guess'] * len(solved.turns)
  lost = results[Status.TURN_LIMIT]
  assert lost.reward == 0 and len(lost.turns) == 3
  malformed = results[3, False]
  assert [t.action.valid for t in malformed.turns] == [False, False, True]
  assert malformed.turns[0].reward == -0.05
  assert malformed.turns[0].observation == 'ERR say: guess NUMBER'


def test_length_by_an_action():
  """The context fills up within an action: it is one, but no call."""
  with guess_pool(max_turns=99) as pool:
    limits = collect.Limits(action_tokens=300)
    digit = world()[1].tokenizer.encode('7')
    engine = make_engine(script={0: digit * 300})
    (t,), metrics = run(
        pool, requests_for(GUESS, group=1), engine=engine, limits=limits
    )
  pieces(t, GUESS.prompt)
  assert t.status is Status.LENGTH and len(t.tokens) == 256
  (turn,) = t.turns
  assert (turn.action.name, turn.action.valid) == ('', False)
  assert (turn.reward, turn.observation) == (0.0, '')
  assert t.total_reward == 0 and metrics['status/length'] == 1


def test_length_by_an_observation():
  """The answer does not fit any more: the rollout ends after the action."""
  with guess_pool(max_turns=99) as pool:
    trajectories, _ = run(pool, requests_for(GUESS, group=4))
  chat = world()[1]
  for t in trajectories:
    pieces(t, GUESS.prompt)
    assert t.status is Status.LENGTH and len(t.tokens) <= 256
    last = t.turns[-1]
    if last.observation:
      answer = chat.observation_ids(last.observation)
      assert len(t.tokens) + len(answer) >= 256
  assert any(t.turns[-1].observation for t in trajectories)


def test_an_action_may_end_at_the_last_place():
  with guess_pool(max_turns=99) as pool:
    chat = world()[1]
    prompt = len(chat.prompt_ids(GUESS.prompt))
    filler = chat.tokenizer.encode('7') * (256 - prompt - 1)
    engine = make_engine(script={0: [*filler, chat.end]})
    limits = collect.Limits(action_tokens=300)
    (t,), _ = run(
        pool, requests_for(GUESS, group=1), engine=engine, limits=limits
    )
  pieces(t, GUESS.prompt)
  assert len(t.tokens) == 256 and t.tokens[-1] == chat.end
  assert t.status is Status.LENGTH
  assert t.turns[0].observation.startswith('ERR')  # it was a call


def test_time_limit_cuts_an_action(pool):
  limits = collect.Limits(action_tokens=6, deadline_s=1e-6)
  engine = make_engine()
  trajectories, metrics = run(
      pool, requests_for(GUESS, WIDE), engine=engine, limits=limits
  )
  for t, task in zip(trajectories, [GUESS] * 3 + [WIDE] * 3):
    assert t.status is Status.TIME_LIMIT and t.reward == 0
    pieces(t, task.prompt)
    assert len(t.turns) == 1 and t.turns[0].action.name == ''
  assert metrics['status/time_limit'] == 1
  assert engine.pages.in_use == 0


# --- what breaks (case 23) ---


def test_a_broken_task_is_excluded_and_counted(pool, collected):
  trajectories, metrics = run(
      pool, requests_for(GUESS) + requests_for(BROKEN, first=50)
  )
  for a, b in zip(trajectories[:3], collected[0]):
    assert_equal(a, b)
  for t in trajectories[3:]:
    assert t.status is Status.ENV_FAILURE and t.failed
    assert len(t.tokens) == 0 and t.turns == ()
    assert "KeyError: 'high'" in t.info['error']
  assert metrics['status/env_failure'] == 0.5
  assert metrics['status/turn_limit'] == 0.5
  np.testing.assert_allclose(metrics['rollout/reward'], -0.15)  # of the others
  assert metrics['rollout/turns'] == 3


def test_nothing_but_broken_environments_is_no_result(pool, collected):
  good = collected[0][:1]
  broken, _ = run(pool, requests_for(BROKEN, first=70))
  collect.check_environments([*broken, *good], 'here')
  with pytest.raises(
      protocol.EnvironmentFailure, match=r"here: all 3 rollouts .*'high'"
  ):
    collect.check_environments(broken, 'here')


class DyingPool(pool_lib.EnvPool):
  """Kills the worker of rollout 0 before each of its first steps."""

  kills, times = 0, 0

  def submit_step(self, env_id, action_text):
    if env_id == 0 and self.kills < self.times:
      self.kills += 1
      process = self._envs[env_id].worker.process
      process.kill()
      process.wait()
    super().submit_step(env_id, action_text)


def dying_pool(times):
  made = DyingPool('forkme', dict(max_turns=3), workers=2)
  made.times = times
  return made


def test_a_worker_that_dies_once_changes_nothing(collected):
  with dying_pool(1) as pool:
    trajectories, _ = run(pool, requests_for(GUESS, WIDE))
    assert pool.stats()['restarts'] == pool.kills == 1
  for a, b in zip(trajectories, collected[0]):
    assert_equal(a, b)


def test_a_worker_that_dies_too_often_fails_its_rollouts(collected):
  times = pool_lib.MAX_REBUILDS + 1
  engine = make_engine()
  with dying_pool(times) as pool:
    trajectories, metrics = run(pool, requests_for(GUESS, WIDE), engine=engine)
    assert pool.kills == times
  failed = [t for t in trajectories[:3] if t.failed]
  assert trajectories[0].failed and len(trajectories[0].turns) == 2
  for t in failed:
    assert 'its worker died 3 times' in t.info['error']
    assert t.reward == 0 and not t.info['solved']
  for a, b in zip(trajectories, collected[0]):
    if not a.failed:
      assert_equal(a, b)
  assert not any(t.failed for t in trajectories[3:])
  np.testing.assert_allclose(metrics['status/env_failure'], len(failed) / 6)
  assert engine.pages.in_use == 0


class InterruptedPool(pool_lib.EnvPool):
  """Raises at one of its polls, as an interrupt at the terminal would."""

  left, error = -1, KeyboardInterrupt

  def poll(self, timeout_s):
    self.left -= 1
    if self.left == 0:
      raise self.error()
    return super().poll(timeout_s)


@pytest.mark.parametrize('after', [1, 2, 15, 40])
def test_an_interrupt_frees_all_slots(collected, after):
  engine = make_engine()
  with InterruptedPool('forkme', dict(max_turns=3), workers=1) as pool:
    chat = world()[1]
    collector = collect.Collector(engine, pool, chat, LIMITS)
    pool.left = after
    with pytest.raises(KeyboardInterrupt):
      collector.collect(requests_for(GUESS, WIDE, GUESS))
    assert engine.pages.in_use == 0 and not engine.busy
    assert pool.stats()['envs'] == 0
    engine.load_params(engine._weights, 7)  # no sequence is open
    again, _ = collector.collect(requests_for(GUESS, WIDE, GUESS))
  for a, b in zip(again, collected[0]):
    assert_equal(a, b)


def test_an_error_of_the_caller_frees_all_slots(pool):
  def fail(done, total):
    raise OSError(f'{done}/{total}: the disk is full')

  engine = make_engine()
  with pytest.raises(OSError, match='the disk is full'):
    run(pool, requests_for(GUESS, WIDE), engine=engine, progress=fail)
  assert engine.pages.in_use == 0 and engine.can_insert()
  assert pool.stats()['envs'] == 0


def test_a_prompt_that_does_not_fit(pool):
  huge = types.Task.create('forkme', 'flux ' * 300, {'low': 1, 'high': 2})
  engine = make_engine()
  with pytest.raises(ValueError, match='prompt of .* tokens: 1..255'):
    run(pool, requests_for(GUESS) + requests_for(huge, first=9), engine=engine)
  assert engine.pages.in_use == 0
  assert pool.stats()['envs'] == 0


# --- the software-engineering environment ---


def test_an_expert_and_a_random_policy_fix_bugs():
  tasks, chat, _, _ = world()
  tasks = tasks[:2]
  perfect = expert.Noise(0.0, 1.0, 1.0, 1.0, 1.0)
  traces = [expert.simulate(task, 0, perfect) for task in tasks]
  script = {
      3 * i: [t for action, _ in trace for t in chat.action_ids(action)]
      for i, trace in enumerate(traces)
  }
  options = dict(sandbox='subprocess', trusted=True, max_turns=10)
  engine = make_engine(4, script)
  limits = collect.Limits(action_tokens=32)
  with pool_lib.EnvPool('swe', options, workers=1) as pool:
    wanted = requests_for(*tasks)
    trajectories, metrics = run(pool, wanted, engine=engine, limits=limits)
  groups = collect.groups_of(tasks, trajectories)
  for group, task, trace in zip(groups, tasks, traces):
    assert group.task is task and len(group.trajectories) == 3
    for t in group.trajectories:
      pieces(t, task.prompt)
    solved, *others = group.trajectories
    assert (solved.status, solved.reward) == (Status.SUBMITTED, 1.0)
    ids, kinds = chat.trace_ids(task.prompt, trace)
    np.testing.assert_array_equal(solved.tokens, ids)  # one token format
    np.testing.assert_array_equal(solved.sampled, kinds == chat_lib.ACTION)
    seen = [(t.action.text, t.observation) for t in solved.turns]
    assert seen == trace
    assert [t.action.name for t in solved.turns][-1] == 'submit'
    for t in others:
      assert t.status in (Status.TURN_LIMIT, Status.LENGTH)
      assert t.reward == 0 and t.total_reward < 0
    assert len({t.turns[0].state for t in group.trajectories}) == 1
  np.testing.assert_allclose(metrics['rollout/solved'], 1 / 3)
