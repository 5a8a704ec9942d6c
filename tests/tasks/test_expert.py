"""The expert solves most tasks, errs as told, and its simulator is exact."""

import asyncio
import random
import time

import pytest

from agentic_rl import types
from agentic_rl.envs import grammar
from agentic_rl.tasks import expert
from agentic_rl.tasks import generate

_PERFECT = expert.Noise(
    list_first=0, test_first=1, right_line=1, right_fix=1, verify=1
)


@pytest.fixture(scope='module')
def tasks():
  return list(generate.generate_tasks(300))


def test_without_noise_it_solves_every_task_in_five_turns(tasks):
  for task in tasks:
    trace, solved = expert.play(task, 0, _PERFECT)
    assert solved
    (bug,) = task.meta['bugs']
    assert [a for a, _ in trace] == [
        'test',
        f'view {bug["file"]}',
        f'edit {bug["file"]} {bug["line"]} {bug["new"]}',
        'test',
        'submit',
    ]
    words = trace[0][1].split(' ', 3)
    assert words[:2] == ['FAIL', bug['file']]
    lines = task.payload['files'][bug['file']].split('\n')
    assert lines[int(words[2]) - 1].startswith(f'def {bug["function"]}(')
    assert words[3].startswith(f'{bug["function"]}(')
    assert [o for _, o in trace[2:]] == ['ok', 'PASS', '']


def test_noise_is_in_the_decisions_with_the_rates_given(tasks):
  plays = [expert.play(t, s) for t in tasks for s in range(3)]
  count = len(plays)
  solved = sum(s for _, s in plays) / count
  assert 0.6 < solved < 0.8
  opened = sum(t[0][0] == 'test' for t, _ in plays) / count
  assert opened == pytest.approx(0.7 * 0.98, abs=0.05)
  exact = 0
  for (trace, _), task in zip(plays, [t for t in tasks for _ in range(3)]):
    first = next(a for a, _ in trace if a.startswith('edit '))
    (bug,) = task.meta['bugs']
    exact += first == f'edit {bug["file"]} {bug["line"]} {bug["new"]}'
  assert exact / count == pytest.approx(0.75 * 0.75, abs=0.06)


def test_it_recovers_from_a_wrong_edit_that_a_test_shows(tasks):
  noise = expert.Noise(verify=1)
  recovered = 0
  for task in tasks:
    trace, solved = expert.play(task, 1, noise)
    edits = sum(a.startswith('edit ') for a, _ in trace)
    recovered += solved and edits > 1
    passes = [o for a, o in trace if a == 'test'][-1] == 'PASS'
    assert not passes or trace[-2][0] == 'test'  # it submits what passes
  assert recovered > 60


@pytest.mark.parametrize('turns', [1, 3, 8])
def test_it_submits_within_its_turns(tasks, turns):
  for task in tasks[:50]:
    trace = expert.simulate(task, 0, expert.Noise(verify=1), turns)
    assert len(trace) <= turns
    assert trace[-1] == ('submit', '')


def test_it_fixes_several_bugs():
  for task in generate.generate_tasks(20, difficulty='long'):
    trace, solved = expert.play(task, 0, _PERFECT, turns=20)
    assert solved, trace


def test_traces_are_deterministic_in_the_seed(tasks):
  for task in tasks[:20]:
    assert expert.simulate(task, 5) == expert.simulate(task, 5)
  assert any(expert.simulate(t, 5) != expert.simulate(t, 6) for t in tasks)


def test_every_action_is_well_formed(tasks):
  for task in tasks:
    for action, _ in expert.simulate(task, 2):
      assert isinstance(grammar.parse(action), grammar.Call), action
      assert grammar.render(grammar.parse(action)) == action


def test_simulator_and_environment_agree():
  swe = pytest.importorskip('agentic_rl.envs.swe')

  async def compare():
    env = swe.SweEnvironment(sandbox='subprocess', trusted=True)
    seen = set()
    for seed in range(20):
      task = generate.generate_task(seed, difficulty='default')
      trace, solved = expert.play(task, seed, expert.Noise(list_first=0.3))
      prompt, _ = await env.reset(seed, task)
      assert prompt == task.prompt
      for action, expected in trace:
        observation, _, over, _, info = await env.step(action)
        assert observation == expected, (task.task_id, action)
        assert info['valid']
        seen.add(info['name'])
      assert over and info['outcome'] == float(solved)
    await env.close()
    return seen

  assert asyncio.run(compare()) == set(grammar.TOOLS)


def test_policy_reads_observations_of_any_environment(tasks):
  task = tasks[0]
  policy = expert.ExpertPolicy(task, random.Random(0), _PERFECT)
  repo = expert.MiniRepo(task)
  observation, actions = '', []
  for _ in range(7):
    actions.append(policy.act(observation))
    observation = repo.step(actions[-1])
  assert actions[-2:] == ['submit', 'submit']


def test_bad_inputs_are_named(tasks):
  with pytest.raises(ValueError, match='verify is 1.5; allowed: 0 to 1'):
    expert.Noise(verify=1.5)
  with pytest.raises(ValueError, match="of 'other' has no bugs in its meta"):
    bare = types.Task.create('other', 'x', {})
    expert.ExpertPolicy(bare, random.Random(0))
  with pytest.raises(ValueError, match="action 'dance'; allowed: list"):
    expert.MiniRepo(tasks[0]).step('dance')


def test_one_token_changes_by_hand():
  assert expert.one_token_changes('x = a * 3', ['a', 'x']) == [
      'x = x * 3',
      'x = a + 3',
      'x = a - 3',
      'x = a * 4',
      'x = a * 2',
  ]


def test_traces_are_fast(tasks):
  start = time.process_time()
  for task in tasks:
    expert.simulate(task, 9)
  assert len(tasks) / (time.process_time() - start) > 500
