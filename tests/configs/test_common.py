import os
import subprocess
import sys

import numpy as np
import pytest

from configs import common

MAIN = common.ROOT / 'launch' / 'main.py'


def make_config():
  return common.locked(
      {
          'seed': 0,
          'sizes': (1, 2),
          'credit': {
              'name': 'action_td',
              'keep_uniform': False,
              'action_td': {'lam': 0.2},
              'grpo': {'normalize_std': True, 'eps': 1e-6},
          },
          'learner': {'lr': 1e-3, 'steps': 5, 'clip': None},
      }
  )


# ------------------------------------------------------------------ arguments


def test_parse_arg():
  spec = {'debug': False, 'layers': 12, 'lr': 0.1, 'preset': 'small'}
  assert common.parse_arg(None, **spec).to_dict() == spec
  got = common.parse_arg('debug, layers=24,lr=3', **spec)
  assert got.to_dict() == {**spec, 'debug': True, 'layers': 24, 'lr': 3.0}
  assert isinstance(got.lr, float)
  assert common.parse_arg('debug=no', **spec).debug is False
  with pytest.raises(AttributeError):
    got.other = 1


@pytest.mark.parametrize(
    'arg, message',
    [
        ('layer=2', r"unknown config argument 'layer' \(near: layers\); allowed:"
         r' debug, layers=12'),
        ('zzz', r"'zzz'; allowed: debug, layers=12"),
        ('layers', "'layers' needs a value: layers=12"),
        ('layers=many', "'layers' must be int, not 'many'"),
        ('layers=2.5', 'must be int'),
        ('debug=perhaps', 'must be bool'),
        ('layers=1,layers=2', 'given twice'),
    ],
)  # fmt: skip
def test_parse_arg_errors(arg, message):
  with pytest.raises(common.ConfigError, match=message):
    common.parse_arg(arg, debug=False, layers=12)


def test_parse_arg_refuses_defaults_without_a_plain_type():
  with pytest.raises(common.ConfigError, match='default of type tuple'):
    common.parse_arg('a=1', a=(1,))


# ------------------------------------------------------- overrides, components


def test_override():
  config = common.override(
      make_config(), {'learner.lr': 1, 'credit.name': 'grpo', 'sizes': (3,)}
  )
  assert config.learner.lr == 1.0 and isinstance(config.learner.lr, float)
  assert common.options(config.credit) == {
      'keep_uniform': False,
      'normalize_std': True,
      'eps': 1e-6,
  }


@pytest.mark.parametrize(
    'values, message',
    [
        ({'learner.lrr': 1}, r"'learner.lrr' \(near: learner.lr.*; fields of "
         'learner: clip, lr, steps'),
        ({'lr': 1}, r'near: learner.lr'),
        ({'lerner.lr': 1}, r'near: learner.lr.*fields of the config'),
        ({'seed.x': 1}, 'seed is a value, without fields'),
        ({'learner.steps': 'many'}, r"is int \(5\), not str"),
        ({'learner.steps': True}, 'is int'),
        ({'credit.keep_uniform': 1}, 'is bool'),
        ({'learner': {}}, 'override one of them'),
    ],
)  # fmt: skip
def test_override_errors(values, message):
  with pytest.raises(common.ConfigError, match=message):
    common.override(make_config(), values)


def test_options_of_the_chosen_component():
  config = make_config()
  assert common.options(config.credit) == {'keep_uniform': False, 'lam': 0.2}
  flat = common.locked({'name': 'x', 'lam': 0.9})
  assert common.options(flat) == {'lam': 0.9}
  with pytest.raises(common.ConfigError, match='without a name'):
    common.options(common.locked({'lam': 1}))
  twice = common.locked({'name': 'x', 'lam': 1, 'x': {'lam': 2}})
  with pytest.raises(common.ConfigError, match='beside'):
    common.options(twice)


# ------------------------------------------------------------------- identity


def test_hash_save_load(tmp_path):
  config = make_config()
  path = tmp_path / 'config.json'
  common.save_resolved(config, path)
  back = common.load_resolved(path)
  assert back.to_dict() == config.to_dict()
  assert common.config_hash(back) == common.config_hash(config)
  other = common.override(make_config(), {'credit.grpo.eps': 1e-5})
  assert common.config_hash(other) != common.config_hash(config)
  odd = common.locked({'a': np.float64(0.5), 'b': np.int32(2)})
  assert common.plain(odd) == {'a': 0.5, 'b': 2}
  with pytest.raises(common.ConfigError, match='plain values'):
    common.config_hash(common.locked({'f': print}))
  path.write_text('{')
  with pytest.raises(common.ConfigError, match='is not a saved config'):
    common.load_resolved(path)
  with pytest.raises(common.ConfigError, match='cannot read'):
    common.load_resolved(tmp_path / 'none.json')


def test_work_directory_of_another_config(tmp_path):
  path = tmp_path / 'config.json'
  common.save_resolved(make_config(), path)
  common.check_same(make_config(), path)
  other = common.override(
      make_config(), {'learner.lr': 0.5, 'learner.steps': 9, 'seed': 1}
  )
  with pytest.raises(common.ConfigError) as error:
    common.check_same(other, path, free=['learner.steps'])
  text = str(error.value)
  assert 'learner.lr: 0.001 there, 0.5 now' in text
  assert 'seed: 0 there, 1 now' in text and 'steps' not in text
  common.check_same(other, path, free=['learner', 'seed'])
  grown = common.locked({**make_config().to_dict(), 'new': 1})
  with pytest.raises(common.ConfigError, match='new: absent there, 1 now'):
    common.check_same(grown, path)


# -------------------------------------------------------------- unread fields


def test_read_tracker():
  tracker = common.ReadTracker(make_config())
  common.config_hash(tracker)
  assert len(tracker.unread()) == len(common.fields(make_config())) == 10
  assert tracker.seed == 0 and tracker['sizes'] == (1, 2)
  assert tracker.credit.name == 'action_td'
  assert 'clip' in tracker.learner and tracker.learner.get('none', 3) == 3
  assert common.options(tracker.credit) == {'keep_uniform': False, 'lam': 0.2}
  # Options of the estimator that was not chosen are decided against.
  assert tracker.unread() == ['learner.clip', 'learner.lr', 'learner.steps']
  assert dict(**tracker.learner) == {'lr': 1e-3, 'steps': 5, 'clip': None}
  assert tracker.unread() == []
  with pytest.raises(AttributeError):
    _ = tracker.absent
  assert tracker.learner.to_dict() == make_config().learner.to_dict()


# --------------------------------------------------------------- command line

_CONFIG = """
from configs import common

def get_config(arg=None):
  arg = common.parse_arg(arg, debug=False, layers=12)
  return common.locked({
      'seed': 3, 'layers': arg.layers,
      'credit': {'name': 'action_td', 'action_td': {'lam': 0.2}, 'grpo': {}},
  })
"""


@pytest.fixture
def config_file(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(_CONFIG)
  return path


def test_prepare_argv(config_file, monkeypatch):
  monkeypatch.chdir(config_file.parent)
  argv = ['main', '--config=mine.py:layers=3', '--config.credit.name=grpo']
  got = common.prepare_argv(argv)
  assert got == ['main', f'--config={config_file}:layers=3', argv[2]]
  assert common.prepare_argv(['main', '--config', 'mine.py']) == [
      'main',
      '--config',
      str(config_file),
  ]
  assert common.load('mine.py:layers=3').layers == 3
  for bad, message in [
      (['--config=mine.py:layer=3'], 'near: layers'),
      (['--config=mine.py', '--config.credit.nam=x'], 'near: credit.name'),
      (['--config=mine.py', '--noconfig.debug'], 'unknown config field'),
      (['--config=mina.py'], 'no config'),
  ]:
    with pytest.raises(common.ConfigError, match=message):
      common.prepare_argv(['main', *bad])


def test_default_workdir():
  name = common.default_workdir
  assert name('configs/swe.py', 0) == 'runs/swe-seed0'
  assert name('/a/swe.py:debug,layers=24', 5) == (
      'runs/swe-debug-layers=24-seed5'
  )


def run_main(*args, cwd, code=None):
  command = [sys.executable, *(['-c', code] if code else [str(MAIN)]), *args]
  return subprocess.run(
      command, cwd=cwd, capture_output=True, text=True, timeout=60
  )


@pytest.mark.parametrize(
    'args, message',
    [
        (['--config=mine.py:layer=3'], 'near: layers'),
        (['--config=mine.py', '--config.credit.nme=x'], 'near: credit.name'),
        (['--config=mine.py', '--config.layers=x'], 'layers'),
        (['--config=mine.py', '--wrkdir=x'], 'mean: workdir'),
        ([], 'config'),
    ],
)
def test_main_says_what_is_wrong(config_file, args, message):
  done = run_main(*args, cwd=config_file.parent)
  text = done.stdout + done.stderr
  assert done.returncode != 0 and message in text
  assert 'Traceback' not in text


def test_help_is_light(tmp_path):
  code = (
      'import runpy, sys\n'
      f'sys.argv = [{str(MAIN)!r}, "--help"]\n'
      'try:\n'
      f'  runpy.run_path({str(MAIN)!r}, run_name="__main__")\n'
      'except SystemExit:\n'
      '  pass\n'
      'heavy = {"jax", "flax", "grain", "orbax", "matplotlib"}\n'
      'print("HEAVY", sorted(heavy & set(sys.modules)))\n'
  )
  done = run_main(cwd=tmp_path, code=code)
  assert 'HEAVY []' in done.stdout, done.stderr
  assert '--workdir' in done.stdout


_TRAIN = """
import os, runpy, signal, sys, types
import agentic_rl

def train(config, workdir, *, stop):
  print('GOT', config.credit.name, workdir, stop.is_set())
  for sig in SIGNALS:
    os.kill(os.getpid(), sig)
  print('STOP', stop.is_set())

fake = types.ModuleType('agentic_rl.train')
fake.train = train
sys.modules['agentic_rl.train'] = agentic_rl.train = fake
SIGNALS = [getattr(signal, s) for s in sys.argv[1].split(',')]
main = sys.argv[2]
sys.argv = [main, *sys.argv[3:]]
runpy.run_path(main, run_name='__main__')
"""


@pytest.mark.parametrize('signals', ['SIGINT', 'SIGTERM', 'SIGINT,SIGINT'])
def test_main_passes_the_config_and_stops(config_file, signals):
  args = ['--config=mine.py:debug', '--config.credit.name=grpo']
  done = run_main(
      signals, str(MAIN), *args, cwd=config_file.parent, code=_TRAIN
  )
  assert 'GOT grpo runs/mine-debug-seed3 False' in done.stdout, done.stderr
  if ',' in signals:  # the second aborts
    assert done.returncode == 130 and 'STOP' not in done.stdout
    assert 'aborted' in done.stderr and 'Traceback' not in done.stderr
  else:
    assert done.returncode == 0 and 'STOP True' in done.stdout


def test_no_config_imports_jax():
  names = [
      str(p.relative_to(common.ROOT).with_suffix('')).replace(os.sep, '.')
      for p in (common.ROOT / 'configs').rglob('*.py')
  ]
  code = (
      'import importlib, sys\n'
      f'for name in {names!r}: importlib.import_module(name)\n'
      'assert "jax" not in sys.modules'
  )
  done = run_main(cwd=common.ROOT, code=code)
  assert done.returncode == 0, done.stderr
