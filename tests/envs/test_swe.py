import asyncio
import json

import pytest

from agentic_rl import envs
from agentic_rl import types
from agentic_rl.envs import swe_tests
from tests.envs import samples


def observations(actions, the_task=None, **options):
  return [t[0] for t in samples.play(actions, the_task, **options)]


def test_an_episode():
  steps = samples.play(
      ['list', 'test', 'view util.py', samples.FIX, 'view util.py', 'test',
       'submit']
  )  # fmt: skip
  assert [s[0] for s in steps] == [
      'const.py tests.py util.py',
      'FAIL util.py stem(4) got 12 want 8',
      '1 # stem(a): a doubled\n2 def stem(a):\n3   b = a * 3\n4   return b',
      'ok',
      '1 # stem(a): a doubled\n2 def stem(a):\n3   b = a * 2\n4   return b',
      'PASS',
      '',
  ]
  assert [s[1] for s in steps] == [0.0] * 7
  assert [s[2] for s in steps] == [False] * 6 + [True]
  assert not any(s[3] for s in steps)
  assert [s[4]['name'] for s in steps][2:4] == ['view', 'edit']
  assert all(s[4]['valid'] and s[4]['env_s'] >= 0 for s in steps)
  info = steps[-1][4]
  assert info['status'] == 'submitted' and info['outcome'] == 1.0
  json.dumps([s[4] for s in steps])


def test_unfixed_submission_gets_nothing():
  ((_, reward, terminated, _, info),) = samples.play(['submit'])
  assert terminated and reward == 0.0
  assert info['outcome'] == 0.0 and info['passed'] == 0 and info['cases'] == 2


def test_half_of_the_hidden_cases_is_not_enough():
  steps = samples.play(['edit util.py 3 b = {4: 8, 5: 10}.get(a)', 'submit'])
  assert steps[-1][4]['passed'] == 1
  assert steps[-1][4]['outcome'] == 0.0


@pytest.mark.parametrize(
    ('action', 'obs'),
    [
        ('view ../secret', "ERR no file '../secret'"),
        ('view /etc/passwd', "ERR no file '/etc/passwd'"),
        ('view .', "ERR no file '.'"),
        ('view ' + 'a' * 99, f"ERR no file '{'a' * 16}'"),
        ('edit ../x 1 y', "ERR no file '../x'"),
        ('edit new.py 1 y', "ERR no file 'new.py'"),
        ('edit tests.py 1 pass', 'ERR tests.py is read-only'),
        ('edit util.py 0 y', 'ERR util.py has 4 lines'),
        ('edit util.py 5 y', 'ERR util.py has 4 lines'),
        ('edit util.py 1 ' + 'y' * 500, 'ERR line too long'),
    ],
)
def test_errors_are_observations(action, obs):
  ((got, reward, terminated, truncated, info),) = samples.play([action])
  assert got == obs
  assert (reward, terminated, truncated) == (0.0, False, False)
  assert not info['valid'] and info['name'] == action.split()[0]


def test_malformed_actions_cost_and_go_on():
  steps = samples.play(['', 'foo bar', 'edit util.py', 'test'])
  assert [s[0] for s in steps[:3]] == [
      'ERR empty action',
      "ERR unknown tool 'foo'",
      'ERR edit takes FILE LINE TEXT',
  ]
  assert [s[1] for s in steps] == [-0.05, -0.05, -0.05, 0.0]
  assert [s[4]['name'] for s in steps] == ['', '', '', 'test']
  assert samples.play(['?'], malformed_penalty=0.5)[0][1] == -0.5


def test_edit_keeps_indentation():
  util = 'def f():\n\tif 1:\n\t  return 1\n\n'
  the_task = samples.task(util=util)
  assert (
      observations(
          ['edit util.py 3     return 2', 'edit util.py 4 x', 'view util.py'],
          the_task,
      )[2]
      == '1 def f():\n2 \tif 1:\n3 \t  return 2\n4 x'
  )


@pytest.mark.parametrize(
    ('line', 'obs'),
    [
        ('b = (', 'FAIL util.py SyntaxError line 3'),
        ('b = 1 / 0', 'FAIL util.py ZeroDivisionError line 3'),
        (
            'b = object()',
            'FAIL util.py stem(4) got <object object at 0x> want 8',
        ),
        ('raise MemoryError(id(a))', 'FAIL util.py MemoryError line 3'),
        ('return stem(a)', 'FAIL util.py RecursionError line 3'),
        ('import os; os._exit(3)', 'FAIL tests.py exit 3'),
        ('raise SystemExit', 'FAIL tests.py no result'),
        ('print("x" * 10**6)', 'FAIL output too long'),
        ('b = "\\n" * 3', 'FAIL util.py stem(4) got'),
        ('b = "w" * 999', ('FAIL util.py stem(4) got ' + 'w' * 999)[:160]),
        ('b = bytearray(10**9)', 'FAIL util.py MemoryError line 3'),
    ],
)
def test_failures_are_one_line_and_deterministic(line, obs):
  actions = [f'edit util.py 3 {line}', 'test']
  first = observations(actions)[1]
  assert first == obs
  assert observations(actions)[1] == first


def test_endless_loop_is_a_timeout():
  steps = samples.play(
      ['edit util.py 3 while a: pass', 'test', 'submit'], test_timeout_s=0.3
  )
  assert steps[1][0] == 'FAIL timeout'
  assert steps[2][4]['outcome'] == 0.0
  assert sum(s[4]['env_s'] for s in steps) < 3


def test_hash_order_is_fixed():
  line = 'b = "".join({"one", "two", "six", "ten"})'
  assert (
      len(
          {observations([f'edit util.py 3 {line}', 'test'])[1] for _ in '12345'}
      )
      == 1
  )


def test_turn_limit():
  steps = samples.play([samples.FIX, 'test'], max_turns=2)
  assert [s[2:4] for s in steps] == [(False, False), (False, True)]
  info = steps[-1][4]
  assert info['status'] == 'turn_limit' and info['outcome'] == 0.0
  steps = samples.play(['test'], max_turns=1, outcome_turn_limit=-0.25)
  assert steps[-1][4]['outcome'] == -0.25
  steps = samples.play([samples.FIX], max_turns=1, grade_unsubmitted=True)
  assert steps[-1][4]['outcome'] == 1.0
  # The last turn may submit.
  steps = samples.play([samples.FIX, 'submit'], max_turns=2)
  assert steps[-1][2:4] == (True, False)


@pytest.mark.parametrize('status', ['length', 'time_limit', 'env_failure'])
def test_end_of_a_cut_episode(status):
  async def run():
    env = envs.SweEnvironment(outcome_length=-1.0, outcome_time_limit=-2.0)
    await env.reset(0, samples.task())
    info = await env.end(types.Status(status))
    with pytest.raises(RuntimeError, match='ended'):
      await env.step('test')
    return info

  info = asyncio.run(run())
  assert info['status'] == status
  wanted = {'length': -1.0, 'time_limit': -2.0, 'env_failure': None}
  assert info['outcome'] == wanted[status]


def test_state_key_is_what_the_state_is():
  def keys(*actions):
    return [s[4]['state'] for s in samples.play(actions)]

  undo = 'edit util.py 3 b = a * 3'
  there_and_back = keys('view util.py', samples.FIX, undo)
  assert there_and_back[0] == there_and_back[2] != there_and_back[1]
  # Order of views, malformed actions and lists change nothing.
  assert keys('view util.py', 'view const.py')[1] == (
      keys('view const.py', 'list', 'foo', 'view util.py')[3]
  )
  assert keys('test')[0] != keys('list')[0]
  other = samples.task(prompt='another')
  assert samples.play(['list'], other)[0][4]['state'] != keys('list')[0]


def test_snapshot_and_restore_go_through_json():
  async def run():
    env = envs.SweEnvironment()
    await env.reset(0, samples.task())
    await env.step('view util.py')
    state = json.dumps(env.snapshot())
    await env.step(samples.FIX)
    after = json.dumps(env.snapshot())
    again = envs.SweEnvironment()
    await again.restore(json.loads(state))
    step = await again.step(samples.FIX)
    assert json.dumps(again.snapshot()) == after
    return step[0], (await again.step('submit'))[4]['outcome']

  assert asyncio.run(run()) == ('ok', 1.0)


def test_observations_are_bounded():
  the_task = samples.task(util='x = 1\n' * 999)
  obs = observations(['view util.py'], the_task, max_obs_chars=50)[0]
  assert len(obs) == 54 and obs.endswith(' ...')


def test_results_are_shared_by_content():
  async def run():
    shared = {}
    group = [envs.SweEnvironment(shared=shared) for _ in range(16)]
    for env in group:
      await env.reset(0, samples.task())
    first = await asyncio.gather(*[env.step('test') for env in group])
    for env in group:
      await env.step(samples.FIX)
    last = await asyncio.gather(*[env.step('submit') for env in group])
    assert {s[0] for s in first} == {'FAIL util.py stem(4) got 12 want 8'}
    assert {s[4]['outcome'] for s in last} == {1.0}
    return group[0].counts

  counts = asyncio.run(run())
  # The failing test, the hidden cases, the visible tests of the fix.
  assert counts['sandbox_runs'] == 3
  assert counts['cache_hits'] == 15 + 15 + 15


def test_agents_code_can_not_change_what_is_graded():
  line = (
      'import builtins; open("util.py", "w").write("def stem(a): return 2*a")'
  )
  steps = samples.play([f'edit util.py 3 {line}', 'test', 'view util.py'])
  assert steps[1][0] == 'FAIL util.py OSError line 3'
  assert line in steps[2][0]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'max_turn': 3}, "unknown option 'max_turn'; allowed: "),
        ({'max_turns': 0}, 'max_turns must be positive'),
        ({'max_turns': True}, 'max_turns must be int'),
        ({'sandbox': 'docker'}, "sandbox='docker'; allowed: bubblewrap"),
        ({'sandbox': 'subprocess'}, 'trusted=True'),
        ({'malformed_penalty': -1.0}, 'at least 0'),
    ],
)
def test_bad_options(options, message):
  with pytest.raises(ValueError, match=message):
    envs.SweEnvironment(**options)


@pytest.mark.parametrize(
    'payload',
    [
        {},
        {'files': {}, 'tests': {}, 'hidden_tests': {'cases': []}},
        {'files': {'../x': ''}, 'tests': {}, 'hidden_tests': {'cases': []}},
        {
            'files': {'a.py': ''},
            'tests': {'a.py': ''},
            'hidden_tests': {'cases': [['a', 'f', [], 1]]},
        },
        {'files': {'a.py': ''}, 'tests': {}, 'hidden_tests': {'cases': [[1]]}},
    ],
)
def test_bad_payloads(payload):
  async def run():
    await envs.SweEnvironment().reset(0, types.Task.create('swe', '', payload))

  with pytest.raises(ValueError, match='task '):
    asyncio.run(run())


def test_trusted_subprocesses_give_the_same_answers():
  actions = ['test', samples.FIX, 'test', 'submit']
  plain = samples.play(actions, sandbox='subprocess', trusted=True)
  boxed = samples.play(actions)
  assert [s[0] for s in plain] == [s[0] for s in boxed]
  assert plain[-1][4]['outcome'] == 1.0


@pytest.mark.parametrize(
    ('got', 'want', 'equal'),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0, False, False),
        (None, None, True),
        ('a', 'a', True),
        ([1, [2]], [1, [2]], True),
        ([1, [True]], [1, [1]], False),
        ({'a': 1}, {'a': 1}, True),
        ({'a': 1}, {'a': 1.0}, False),
        (float('nan'), float('nan'), True),
    ],
)
def test_values_are_compared_with_their_types(got, want, equal):
  assert swe_tests.same(got, want) is equal


@pytest.mark.parametrize(
    ('line', 'want', 'outcome'),
    [
        ('b = 1', 1, 1.0),
        ('b = True', 1, 0.0),
        ('b = 1.0', 1, 0.0),
        ('b = [1, "é\\n", None, 2.5]', [1, 'é\n', None, 2.5], 1.0),
        ('b = (1, 2)', [1, 2], 0.0),
        ('b = {"k": [1]}', {'k': [1]}, 1.0),
        ('b = 10 ** 5000', 1, 0.0),
        ('b = type("E", (int,), {})(1)', 1, 0.0),
        ('b = type("E", (), {"__eq__": lambda *_: True})()', 1, 0.0),
        ('raise KeyError(a)', 1, 0.0),
    ],
)
def test_hidden_values(line, want, outcome):
  the_task = samples.task(
      tests="print('PASS')\n", hidden=[['util', 'stem', [4], want]]
  )
  steps = samples.play([f'edit util.py 3 {line}', 'submit'], the_task)
  assert steps[-1][4]['outcome'] == outcome
