"""The exactness matrix of a policy, and that it sees what differs."""

import dataclasses
import json

import numpy as np
import pytest

from agentic_rl.diagnostics import policy_matrix
from agentic_rl.diagnostics import traffic
from agentic_rl.rollout import engine as engine_lib
from launch import verify
from tests.rollout import samples

CFG = samples.config(layers=2)
SAMPLING = engine_lib.Sampling()


def measure(cfg, **options):
  return policy_matrix.measure(
      cfg, samples.weights(cfg), sampling=SAMPLING, **options
  )


def test_nothing_differs():
  said = []
  report = measure(CFG, positions=600, note=said.append)
  assert report['exact'] and report['recorded'] >= 600
  arms = {(a['side'], a['arm']): a for a in report['arms']}
  assert len(said) == 1 + len(arms)
  assert len(arms) == len(report['arms']) == 9
  few = arms['sampler', '1 sequence at a time']['positions']
  every = arms['sampler', '64, in reverse']['positions']
  assert 0 < few < every == report['recorded']
  for name in ('prefixes known', 'branches, known and not'):
    assert arms['sampler', name]['kv_hits'] > 0
  learned = [a for (side, _), a in arms.items() if side != 'sampler']
  assert [a['positions'] for a in learned] == [report['recorded']] * 4
  for field in policy_matrix.Counts._fields:
    assert report[field] == sum(a[field] for a in report['arms'])
  text = policy_matrix.table(report)
  assert text.endswith('\nexact') and '8 x 128 tokens' in text


def test_the_control_differs():
  """The learner's programs sum in other orders than the recording did."""
  cfg = samples.config(width=64, layers=2, exact=False)
  report = measure(cfg, positions=200)
  assert not report['exact'] and report['unequal_bits'] > 20
  assert policy_matrix.table(report).endswith('\nNOT exact')


def test_no_number_is_not_exact():
  weights = samples.weights(CFG)
  weights['final_norm'] = weights['final_norm'].at[0].set(np.nan)
  with pytest.raises(ValueError, match='not finite'):
    policy_matrix.measure(CFG, weights, sampling=SAMPLING, positions=20)


@pytest.fixture(scope='module')
def recorded():
  scripts = samples.traffic(CFG, 12, 1)
  return scripts, samples.play(samples.make_engine(CFG), scripts)


def test_a_changed_token_log_prob_or_expert_is_counted(recorded):
  _, played = recorded
  name = min(played)
  drawn = sum(int(p.sampled.sum()) for p in played.values())
  assert policy_matrix.by_sampler(played, played, 3) == (drawn, 0, 0, 0, 3)
  other = dataclasses.replace(
      played[name],
      **{f: getattr(played[name], f).copy() for f in ('tokens', 'logp')},
      routes=(played[name].routes + 1) % CFG.experts,
  )
  place = np.flatnonzero(other.sampled)[0]
  other.tokens[place] ^= 1
  other.logp[place : place + 1].view(np.int32)[0] ^= 1
  found = policy_matrix.by_sampler(played, played | {name: other})
  assert found == (drawn, 1, other.routes.size, 1, 0)
  assert not found.exact


@pytest.mark.parametrize('check', ['by_forward', 'by_gradient'])
def test_a_learner_finds_what_was_changed(recorded, check):
  scripts, played = recorded
  examples = traffic.examples(scripts, played)
  learner = policy_matrix.make_learner(CFG, 2, 64)
  check = getattr(policy_matrix, check)
  weights = samples.weights(CFG)
  drawn = sum(int(e.sampled.sum()) for e in examples)
  assert check(learner, weights, examples) == (drawn, 0, 0, 0, 0)
  one = examples[0] = dataclasses.replace(
      examples[0],
      logp_behavior=examples[0].logp_behavior.copy(),
      routes=examples[0].routes.copy(),
  )
  place = np.flatnonzero(one.sampled)[0]
  one.logp_behavior[place : place + 1].view(np.int32)[0] ^= 1
  one.routes[0, 0, 0] ^= 1
  assert check(learner, weights, examples) == (drawn, 1, 1, 0, 0)


def test_branches_go_on_from_what_was_drawn(recorded):
  scripts, played = recorded
  grown = policy_matrix.branches(scripts, played, CFG, 100)
  assert [s.rollout_id for s in grown] == list(range(100, 100 + len(grown)))
  assert len(grown) > 6
  beginnings = {tuple(p.tokens[: len(s.prompt)]) for p in played.values()
                for s in grown}  # fmt: skip
  for script in grown:
    assert script.prompt in beginnings
    assert script.length < CFG.max_context


def test_meshes_that_fit():
  """Four experts and a width of 32: eight devices can not share experts."""
  asked = ['data=2', 'expert=8', 'fsdp=8', 'context=64', 'data=64']
  assert policy_matrix.fitting(CFG, asked) == ['data=2', 'fsdp=8']
  with pytest.raises(ValueError, match='expert=8 can not cut'):
    policy_matrix.measure(
        CFG, samples.weights(CFG), sampling=SAMPLING, positions=20,
        meshes=['expert=8'],
    )  # fmt: skip
  with pytest.raises(ValueError, match="mesh='data=1' is one device"):
    policy_matrix.measure(CFG, {}, sampling=SAMPLING, meshes=['data=1'])
  with pytest.raises(ValueError, match='temperature=0'):
    policy_matrix.measure(
        CFG, {}, sampling=engine_lib.Sampling(temperature=0.0)
    )


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
  """With a mesh, whose sampler and learner record and find the same."""
  out = tmp_path / 'out.json'
  words = ['exactness', '--fresh', '--config=configs/swe.py:debug']
  words += ['--positions=300', '--meshes', 'data=2,expert=2', f'--json={out}']
  assert verify.main([*words, '--config.policy.precision=bfloat16']) == 0
  report = json.loads(out.read_text())
  assert report['exact'] and len(report['arms']) == 11
  assert {a['side'] for a in report['arms'][-2:]} == {'sampler', 'gradient'}
  assert 'data=2,expert=2' in capsys.readouterr().out
  assert verify.main(['exactness', '--fresh', '--meshes', 'model=2']) == 2
  assert "'model=2' is not allowed" in capsys.readouterr().err
