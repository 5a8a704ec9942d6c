"""The config of the main job: its arguments, and that every field is read."""

import pytest

from agentic_rl import train
from configs import common
from configs import forkme
from configs import swe

TINY = {
    'policy.width': 32,
    'policy.head_width': 8,
    'tokenizer.corpus_tasks': 100,
    'warm_start.steps': 2,
    'warm_start.sequences': 8,
    'learner.iterations': 1,
    'evaluation.tasks': 2,
    'evaluation.greedy_tasks': 2,
}


def test_arguments():
  config = swe.get_config()
  assert config.is_locked and config.policy.layers == 8
  assert swe.get_config('layers=12').policy.layers == 12
  debug = swe.get_config('debug')
  assert debug.learner.iterations < config.learner.iterations
  # The miniature has every field of the whole.
  assert common.fields(debug).keys() == common.fields(config).keys()
  for arg in ('debgu', 'layers', 'layers=deep', 'debug,debug', 'width=3'):
    with pytest.raises(common.ConfigError):
      swe.get_config(arg)


def test_fields_are_locked():
  config = swe.get_config()
  with pytest.raises(AttributeError):
    config.new = 1
  with pytest.raises(AttributeError):
    config.policy.widht = 1


def test_an_empty_argument_is_none():
  assert common.config_hash(swe.get_config()) == common.config_hash(
      swe.get_config('')
  )


def test_every_field_is_read(tmp_path):
  config = common.override(swe.get_config('debug'), TINY)
  with config.unlocked():
    config.rollout.nobodys = 1  # shows that an unread field is seen
  tracker = common.ReadTracker(config)
  summary = train.train(tracker, tmp_path / 'run')
  assert summary['iterations'] == 1
  assert tracker.unread() == ['rollout.nobodys']


def test_the_config_to_copy_has_only_fields_of_the_full_one():
  full = common.fields(swe.get_config())
  config = forkme.get_config('iterations=3')
  assert config.learner.iterations == 3
  for path in common.fields(config):
    component, _, name = path.partition('.')
    own = f'{component}.{full.get(f"{component}.name")}.{name}'
    assert path in full or own in full, path
