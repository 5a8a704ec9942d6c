"""Runs that begin from another run's warm start."""

import json
import shutil

import pytest

from agentic_rl import setup_run
from agentic_rl import warm_source
from configs import common
from configs import swe
from tests.smoke import runs


@pytest.mark.slow
def test_a_run_from_the_weights_of_another_ends_as_that_one(tmp_path):
  base, _ = runs.base()
  source, workdir = tmp_path / 'source', tmp_path / 'run'
  shutil.copytree(base, source)
  shutil.rmtree(source / 'checkpoints' / 'rl')
  before = {p: p.stat().st_mtime_ns for p in source.rglob('*')}
  values = {'warm_start.weights': source}
  first = runs.run(workdir, {**values, 'learner.iterations': 4})
  assert first.code == 0, first.errors
  assert 'warm_start, ' not in first.text
  assert {p: p.stat().st_mtime_ns for p in source.rglob('*')} == before
  got, want = runs.summary(workdir), runs.summary(base)
  for key in ('params_sha256', 'heldout_solve_before', 'tokens_sampled'):
    assert got[key] == want[key], key
  assert got['warm_start_s'] == 0
  kept = common.load_resolved(workdir / 'config.json')
  assert kept.warm_start.weights == str(source)
  # Once they are taken the source is not needed: the end is done again.
  shutil.rmtree(source)
  (workdir / 'summary.json').unlink()
  again = runs.run(workdir, values)
  assert again.code == 0, again.errors
  assert runs.summary(workdir)['params_sha256'] == want['params_sha256']


@pytest.fixture
def config(tmp_path):
  """The config of a run that takes the weights of `tmp_path/source`."""
  base, _ = runs.base()
  source = tmp_path / 'source'
  source.mkdir()
  for name in ('heldout', 'checkpoints/warm_start'):
    shutil.copytree(base / name, source / name)
  for name in ('config.json', 'tokenizer.json'):
    shutil.copy(base / name, source / name)
  values = {**runs.SMALL, 'warm_start.weights': str(source)}
  return common.override(swe.get_config('debug'), values)


@pytest.mark.parametrize(
    'values, words',
    [
        ({'policy.width': 64}, ['policy.width is 32 there, 64 here']),
        ({'policy.precision': 'bfloat16'}, ["'float32' there, 'bfloat16'"]),
        ({'tokenizer.vocab_size': 400}, ['tokenizer.vocab_size is 512 there']),
        ({'tasks.fresh.difficulty': 'default'}, ['held-out task 0 is']),
        ({'warm_start.weights': 'nowhere'}, ["'nowhere'", 'no work directory']),
    ],
)
def test_what_differs_is_named(tmp_path, config, values, words):
  config = common.override(config, values)
  with pytest.raises(common.ConfigError) as error:
    setup_run.setup(config, tmp_path / 'run')
  for word in ['warm_start.weights=', *words]:
    assert word in str(error.value)
  assert not (tmp_path / 'run' / 'config.json').exists()


def test_an_unfinished_warm_start_is_refused(config):
  folder = config.warm_start.weights
  shutil.rmtree(f'{folder}/checkpoints/warm_start/20')
  with pytest.raises(common.ConfigError, match='20 steps .* is step 15'):
    warm_source.Source(folder)
  shutil.rmtree(f'{folder}/checkpoints')
  with pytest.raises(common.ConfigError, match='checkpoint is none'):
    warm_source.Source(folder)


def test_how_the_weights_are_computed_with_may_differ(tmp_path, config):
  config = common.override(
      config, {'policy.exact': False, 'policy.impl': 'reference'}
  )
  with setup_run.setup(config, tmp_path / 'run') as run:
    source = warm_source.Source(config.warm_start.weights)
    source.check(run.policy, run.heldout)
    assert not run.policy.exact
  saved = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert saved['warm_start']['weights'] == config.warm_start.weights
