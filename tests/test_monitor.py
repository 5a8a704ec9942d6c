"""A sampler that holds other weights than the learner is seen and acted on.

The runs are whole ones, in this process; what is broken is one bit of one
weight, before or after the hash of a publication is taken.
"""

import json
import pathlib
import types

import jax
import numpy as np
import pytest

from agentic_rl import metrics as metrics_lib
from agentic_rl import monitor
from agentic_rl import train
from agentic_rl.policy import identity
from agentic_rl.rollout import engine as engine_lib
from configs import common

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOOD = dict.fromkeys(monitor.ZEROS, 0) | {
    'mismatch/compared': 50, 'mismatch/max_abs_dlogp': 0.0,
    'router/flip_rate': 0.0, 'router/max_load': 3.0,
}  # fmt: skip


# --- the decision ---


def make_run(folder, on_mismatch, *, exact=True, alerts=None):
  """The parts of a run that the monitor looks at."""
  return types.SimpleNamespace(
      policy=types.SimpleNamespace(exact=exact),
      config=common.ConfigDict(dict(learner=dict(on_mismatch=on_mismatch))),
      metrics=metrics_lib.Metrics(folder, alerts=alerts),
      workdir=folder,
  )


def alerts_of(folder):
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [row for row in map(json.loads, lines) if 'alert' in row]


@pytest.mark.parametrize('action', ['warn', 'skip', 'stop'])
@pytest.mark.parametrize('name', monitor.ZEROS)
def test_an_exact_policy_gives_zeros(tmp_path, action, name):
  run = make_run(tmp_path, action)
  assert monitor.may_apply(run, 1, GOOD)
  assert not alerts_of(tmp_path)
  bad = GOOD | {name: 2}
  if action == 'stop':
    with pytest.raises(monitor.MismatchError) as error:
      monitor.may_apply(run, 7, bad)
    for words in (
        f'iteration 7: .* 50 drawn tokens .*: {name} = 2, 0 expected',
        'trajectories/rl-000007',
        f'verify.py mismatch --workdir={tmp_path}',
        'on_mismatch=skip',
    ):
      assert error.match(words)
  else:
    assert monitor.may_apply(run, 7, bad) == (action == 'warn')
  (alert,) = alerts_of(tmp_path)
  assert (alert['alert'], alert['value'], alert['step']) == (name, 2, 7)


@pytest.mark.parametrize('name', monitor.COMPARED)
def test_that_nothing_was_compared_is_no_zero(tmp_path, name):
  good = GOOD | {'router/compared': 400}
  run = make_run(tmp_path, 'stop')
  assert monitor.may_apply(run, 1, good)
  with pytest.raises(monitor.MismatchError, match=f'{name} = 0, above 0 exp'):
    monitor.may_apply(run, 1, good | {name: 0.0})
  assert monitor.may_apply(make_run(tmp_path, 'stop', exact=False), 1, good)


BOUNDS = {
    'mismatch/max_abs_dlogp': (None, 0.1), 'router/flip_rate': (None, 0.01),
    'router/max_load': (None, 2.0),
}  # fmt: skip


@pytest.mark.parametrize('action', ['warn', 'skip', 'stop'])
def test_other_policies_have_the_bounds_of_the_alerts(tmp_path, action):
  run = make_run(tmp_path, action, exact=False, alerts=BOUNDS)
  some = {'mismatch/unequal_bits': 50, 'router/flips': 3}
  within = GOOD | some | {'mismatch/max_abs_dlogp': 0.09}
  assert monitor.may_apply(run, 1, within)
  for name, value in (
      ('mismatch/max_abs_dlogp', 0.2),
      ('mismatch/max_abs_dlogp', float('nan')),
      ('router/flip_rate', 0.02),
  ):
    beyond = within | {name: value}
    if action == 'stop':
      with pytest.raises(monitor.MismatchError, match=f'{name} = '):
        monitor.may_apply(run, 2, beyond)
    else:
      assert monitor.may_apply(run, 2, beyond) == (action == 'warn')
  # Weights that differ are never expected.
  if action == 'skip':
    assert not monitor.may_apply(run, 3, GOOD | {monitor.WEIGHTS: 1})


def test_a_bound_that_is_left_is_recorded_once(tmp_path, capsys):
  """The alert of a bound comes with the metrics, not from the monitor too."""
  run = make_run(tmp_path, 'skip', exact=False, alerts=BOUNDS)
  beyond = GOOD | {'mismatch/max_abs_dlogp': 0.2, 'router/max_load': 1.0}
  assert not monitor.may_apply(run, 1, beyond)
  assert capsys.readouterr().out == (
      'Iteration 1: the update is skipped; mismatch/max_abs_dlogp = 0.2, above'
      ' 0.1.\n'
  )
  run.metrics.log(1, beyond)
  (alert,) = alerts_of(tmp_path)
  assert alert['alert'] == 'mismatch/max_abs_dlogp'
  assert alert['message'] == 'above 0.1'


# --- whole runs ---


def flipped(weights):
  """Returns the weights with the last bit of one number of a norm flipped."""
  norm = np.array(weights['final_norm'])
  norm[3:4].view(np.int32)[0] ^= 1
  return weights | {'final_norm': jax.numpy.asarray(norm)}


def break_sampler(monkeypatch, version, when):
  """One bit of one weight is wrong 'before' or 'after' the hash is taken."""
  load = engine_lib.Engine.load_params

  def broken(self, weights, number):
    if number != version:
      return load(self, weights, number)
    if when == 'before':
      return load(self, flipped(weights), number)
    load(self, weights, number)
    self._weights = flipped(weights)

  monkeypatch.setattr(engine_lib.Engine, 'load_params', broken)


def run(workdir, on_mismatch='stop', **values):
  config = common.load(f'{ROOT}/configs/forkme.py:iterations=3')
  with config.unlocked():
    config.policy.update(layers=2, pattern='wb')  # half the compilation
  values = {
      'warm_start.steps': 0,
      'env_pool.workers': 1,
      'evaluation.tasks': 1,
      'evaluation.greedy_tasks': 1,
      'checkpoint.keep': 9,
      # Weights move whatever the rewards; no rollout is cut on a slow machine.
      'learner.entropy': 0.01,
      'rollout.deadline_s': 3000.0,
      'env_pool.deadline_s': 600.0,
      'learner.on_mismatch': on_mismatch,
  } | {k.replace('__', '.'): v for k, v in values.items()}
  return train.train(common.override(config, values), workdir)


def rows(workdir):
  return metrics_lib.read_rows(workdir, 'rl')


def digests(workdir, step):
  """Returns a digest of every array of weights and optimizer state."""
  folder = workdir / 'checkpoints' / 'rl' / str(step) / 'meta'
  return json.loads((folder / 'metadata').read_text())['leaves']


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run that nothing disturbs, and its summary."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  return workdir, run(workdir)


def test_an_undisturbed_run_publishes_its_own_weights(whole):
  """Case 10."""
  workdir, summary = whole
  assert summary['skipped_updates'] == summary['unequal_logprob_bits'] == 0
  hashes = [row['publish/weights_hash'] for row in rows(workdir)]
  assert len(set(hashes)) == 3
  assert all(len(h) == 16 and int(h, 16) >= 0 for h in hashes)
  assert summary['weights_hash'] not in hashes
  for row in rows(workdir):
    assert row['publish/bytes_moved'] == row['publish/unequal_weights'] == 0
    assert row['mismatch/skipped'] == 0
    assert row['mismatch/outside_share'] == 0
  assert not alerts_of(workdir)


def test_stop_leaves_a_state_to_look_at_and_to_go_on_from(
    whole, tmp_path, monkeypatch
):
  workdir = tmp_path / 'run'
  with monkeypatch.context() as patch:
    break_sampler(patch, 1, 'after')
    with pytest.raises(monitor.MismatchError) as error:
      run(workdir, 'stop', checkpoint__rl_every=3)
  assert error.match('iteration 2: .* 0 expected.*verify.py mismatch')
  journal = workdir / 'trajectories' / 'rl-000002.jsonl.gz'
  assert journal.exists() and error.match(str(journal))
  assert [a['alert'] for a in alerts_of(workdir)] == [monitor.ZEROS[0]]
  # The state before the batch, though no checkpoint was due.
  assert digests(workdir, 1) == digests(whole[0], 1)
  assert not (workdir / 'checkpoints' / 'rl' / '2').exists()
  # The fault is gone: the run ends as if it had never been.
  summary = run(workdir, 'skip', checkpoint__rl_every=3)
  for name in ('params_sha256', 'tokens_sampled', 'weights_hash'):
    assert summary[name] == whole[1][name]
  assert summary['skipped_updates'] == summary['unequal_logprob_bits'] == 0


@pytest.mark.parametrize(
    'when', ['after', pytest.param('before', marks=pytest.mark.slow)]
)
def test_skip_leaves_weights_and_optimizer_alone(
    whole, tmp_path, monkeypatch, when
):
  break_sampler(monkeypatch, 1, when)
  workdir = tmp_path / 'run'
  summary = run(workdir, 'skip')
  assert summary['skipped_updates'] == 1 and summary['iterations'] == 3
  assert summary['unequal_logprob_bits'] > 0
  assert digests(workdir, 1) == digests(whole[0], 1)
  assert digests(workdir, 2) == digests(workdir, 1)
  assert digests(workdir, 3) != digests(workdir, 2)
  assert [r['mismatch/skipped'] for r in rows(workdir)] == [0, 1, 0]
  first, second, third = (r['publish/weights_hash'] for r in rows(workdir))
  assert first != third
  assert (second == third) == (when == 'after')
  wrong = [r['publish/unequal_weights'] for r in rows(workdir)]
  assert wrong == [0, when == 'before', 0]


@pytest.mark.slow
def test_warn_says_so_and_goes_on(whole, tmp_path, monkeypatch):
  break_sampler(monkeypatch, 1, 'after')
  workdir = tmp_path / 'run'
  summary = run(workdir, 'warn')
  assert summary['skipped_updates'] == 0 and summary['iterations'] == 3
  assert summary['unequal_logprob_bits'] > 0
  assert [a['alert'] for a in alerts_of(workdir)] == [monitor.ZEROS[0]]
  assert digests(workdir, 1) == digests(whole[0], 1)
  assert digests(workdir, 2) != digests(workdir, 1)


def test_other_weights_stop_the_run_before_it_samples(tmp_path, monkeypatch):
  """Case 10: the hash is compared after each publication."""
  break_sampler(monkeypatch, 0, 'before')
  workdir = tmp_path / 'run'
  with pytest.raises(monitor.MismatchError) as error:
    run(workdir, 'stop')
  assert error.match('publication of version 0 the learner holds weights of')
  assert not (workdir / 'trajectories').exists()
  (alert,) = alerts_of(workdir)
  assert (alert['alert'], alert['value']) == (monitor.WEIGHTS, 1)
  saved = digests(workdir, 0)
  assert any(name.startswith('weights') for name in saved)


@pytest.mark.slow
def test_engines_that_hold_copies_report_their_bytes(tmp_path, monkeypatch):
  """Copies have the same hash, and are no longer the learner's memory."""
  load = engine_lib.Engine.load_params
  monkeypatch.setattr(
      engine_lib.Engine,
      'load_params',
      lambda self, weights, version: load(
          self, jax.tree.map(lambda a: a.copy(), weights), version
      ),
  )
  made = []
  publish = monitor.publish

  def keep(run, weights, version):
    made.append(sum(a.nbytes for a in jax.tree.leaves(weights)))
    made.append(identity.weights_hash(weights))
    return publish(run, weights, version)

  monkeypatch.setattr(monitor, 'publish', keep)
  workdir = tmp_path / 'run'
  run(workdir, learner__iterations=1)
  (row,) = rows(workdir)
  assert row['publish/bytes_moved'] == made[0] > 0
  assert row['publish/weights_hash'] == made[1]
  assert row['publish/unequal_weights'] == 0
