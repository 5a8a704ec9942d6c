import asyncio
import json

import pytest

from agentic_rl import envs
from agentic_rl import types

TASK = types.Task.create('forkme', 'Guess from 1 to 9.', {'low': 1, 'high': 9})


def play(policy, **options):
  async def run():
    env = envs.GuessEnvironment(**options)
    await env.check()
    obs, info = await env.reset(3, TASK)
    steps = []
    while True:
      step = await env.step(policy(obs, len(steps)))
      steps.append(step)
      obs = step[0]
      if step[2] or step[3]:
        await env.close()
        return info, steps

  return asyncio.run(run())


def bisect():
  bounds = [1, 9]

  def policy(obs, turn):
    if turn:
      middle = sum(bounds) // 2
      bounds[obs != 'higher'] = middle + 1 if obs == 'higher' else middle - 1
    return f'guess {sum(bounds) // 2}'

  return policy


def test_bisection_finds_the_number():
  info, steps = play(bisect())
  assert steps[-1][0] == 'right' and steps[-1][2]
  assert steps[-1][4]['outcome'] == 1.0
  assert steps[-1][4]['status'] == 'submitted'
  assert len({info['state']} | {s[4]['state'] for s in steps}) == len(steps) + 1


def test_turn_limit_and_errors():
  _, steps = play(lambda *_: 'guess x', max_turns=3)
  assert [s[:4] for s in steps] == [
      ("ERR no number 'x'", -0.05, False, False),
      ("ERR no number 'x'", -0.05, False, False),
      ("ERR no number 'x'", -0.05, False, True),
  ]
  assert steps[-1][4]['status'] == 'turn_limit'
  assert steps[-1][4]['outcome'] == 0.0


def test_snapshot():
  async def run():
    env = envs.GuessEnvironment()
    await env.reset(0, TASK)
    await env.step('guess 5')
    other = envs.GuessEnvironment()
    await other.restore(json.loads(json.dumps(env.snapshot())))
    assert await other.step('nonsense') is not None
    assert other.snapshot() != env.snapshot()
    info = await env.end(types.Status.LENGTH)
    assert info['status'] == 'length' and info['outcome'] == 0.0
    with pytest.raises(RuntimeError):
      await env.step('guess 5')

  asyncio.run(run())


def test_the_table():
  assert envs.ENVIRONMENTS['swe'] is envs.SweEnvironment
  assert envs.ENVIRONMENTS['forkme'] is envs.GuessEnvironment
