"""launch/verify.py: sources of tokens, both paths, files, exit codes."""

import dataclasses
import gzip
import json
import re
import shutil

import jax
import numpy as np
import pytest

from agentic_rl import checkpoint
from agentic_rl import types
from agentic_rl.diagnostics import mismatch as mismatch_lib
from agentic_rl.diagnostics import mismatch_report
from agentic_rl.diagnostics import mismatch_run
from agentic_rl.diagnostics import mismatch_tokens as tokens_lib
from agentic_rl.diagnostics import traffic
from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib
from agentic_rl.rollout import journal
from configs import common
from launch import verify
from tests.rollout import samples

TEXT = 'def low(a, b):\n  return a + b * 4\nFAIL core.py 6 got 10 want -5\n'
SHAPE = dict(
    width=32, layers=2, pattern='wb', heads=2, kv_heads=1, head_width=16,
    experts=4, expert_width=16, window=12, page=8, topk_pages=2, max_context=64,
)  # fmt: skip
OVERRIDES = {f'policy.{k}': v for k, v in SHAPE.items()} | {
    'tokenizer.vocab_size': 260,
    'rollout.engines': 1,
    'rollout.max_sequences': 8,
    'learner.rows': 4,
    'learner.row_tokens': 64,
}
FLAGS = [f'--config.{k}={v}' for k, v in OVERRIDES.items()]


def make_config(**more):
  config = common.load('configs/swe.py:debug')
  return common.override(config, OVERRIDES | more)


CFG = mismatch_run.load(make_config()).cfg


def play(cfg, weights, source):
  """Plays scripts on the engine of a run; returns its trajectories."""
  sampling = engine_lib.Sampling()
  engine = engines_lib.Engines(
      cfg,
      0,
      engines=1,
      max_sequences=8,
      sampling=sampling,
      likeliest=mismatch_run.LIKELIEST,  # the programs of the command
  )
  engine.load_params(weights, 3)
  played = traffic.play(engine, source.scripts)
  return [
      types.Trajectory(
          rollout_id=s.rollout_id, task_id='', seed=0,
          tokens=played[s.rollout_id].tokens,
          sampled=played[s.rollout_id].sampled,
          logp_behavior=played[s.rollout_id].logp,
          routes=played[s.rollout_id].routes, weight_version=3, turns=(),
          status=types.Status.SUBMITTED, reward=0.0,
      )
      for s in source.scripts
  ]  # fmt: skip


@pytest.fixture(scope='module')
def logged():
  """(weights, trajectories) of a policy that is not the initial one."""
  weights = samples.weights(CFG, 1)
  return weights, play(CFG, weights, tokens_lib.from_traffic(CFG, 300))


@pytest.fixture(scope='module')
def run_folder(logged, tmp_path_factory):
  """A work directory with two checkpoints, a vocabulary and trajectories."""
  folder = tmp_path_factory.mktemp('run')
  weights, trajectories = logged
  common.save_resolved(make_config(), folder / 'config.json')
  tokenizer_lib.Tokenizer.train([TEXT], 260).save(folder / 'tokenizer.json')
  with checkpoint.Checkpointer(folder / 'checkpoints' / 'rl') as checkpoints:
    for step, tree in ((2, samples.weights(CFG, 0)), (3, weights)):
      checkpoints.save(step, {'weights': tree, 'optimizer': {'n': tree}}, {})
  for step, half in ((2, trajectories[:1]), (3, trajectories[1:])):
    journal.write(journal.path_of(folder, 'rl', step), half)
  return folder


def mismatch(tmp_path, *words):
  """Runs the command; returns the exit code and the report."""
  path = tmp_path / 'report.json'
  code = verify.main(['mismatch', *map(str, words), f'--json={path}'])
  return code, json.loads(path.read_text())


def test_a_run_beside_its_control(run_folder, tmp_path, capsys):
  page = tmp_path / 'report.html'
  code, report = mismatch(
      tmp_path, f'--workdir={run_folder}', '--control', f'--html={page}'
  )
  assert code == 0
  assert report['verdict'] == 'exact'
  assert report['unequal_bits'] == report['route_flips'] == 0
  assert report['max_abs_dlogp'] == report['kl_k3'] == 0
  assert report['topk_hit_rate'] == 1
  logged = list(tokens_lib.newest_trajectories(run_folder))
  each = [int(t.sampled.sum()) for p in logged for t in journal.read(p)]
  # Some come a second time, and of these the second half is drawn.
  drawn = sum(each) + sum(n - n // 2 for n in each[:: tokens_lib.AGAIN])
  assert report['positions'] == report['gradient']['positions'] == drawn >= 300
  assert report['positions'] == sum(b['positions'] for b in report['buckets'])
  assert report['sampler']['decoded'] == drawn
  assert report['sampler']['kv_misses'] > 0 < report['sampler']['prefilled']
  assert report['policy']['origin'].endswith('checkpoints/rl step 3')
  assert not report['tokens']['drawn_by_policy']
  control = report['control']
  assert control['positions'] == drawn
  assert control['unequal_bits'] > drawn // 20
  assert 0 < control['max_abs_dlogp'] < 1e-4 and control['kl_k3'] >= 0
  assert control['verdict'] in ('flat', 'accumulating')
  assert control['buckets'][-1]['max_abs_dlogp'] > 0
  text = page.read_text()
  assert 'exact' in text and 'control (no invariance)' in text
  outside = re.sub(r'base64,[^"]*', '', text)  # the picture is inside
  assert re.findall(r'(?:src|href|url)\W{1,3}([^"\')]*)', outside) == [
      'data:image/png;'
  ]
  assert '://' not in text.replace(str(run_folder), '')
  shown = capsys.readouterr()
  assert 'verdict: exact' in shown.out
  assert f'exact, sampler: 0 of {drawn} positions' in shown.err
  assert f'control, learner: 0 of {drawn} positions' in shown.err


def test_fresh_traffic(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # there is no runs/swe-debug-seed0
  code, report = mismatch(
      tmp_path, '--config=configs/swe.py:debug', '--positions=200', *FLAGS
  )
  assert code == 0 and report['verdict'] == 'exact'
  assert report['policy']['origin'] == 'fresh weights, seed 0'
  assert report['tokens']['drawn_by_policy']
  assert 200 <= report['positions'] < 260 and 'control' not in report


def test_a_wrong_weight_is_seen(run_folder, logged, tmp_path):
  """What other weights logged does not count, what they compute does."""
  weights, _ = logged
  policy = mismatch_run.load(make_config(), workdir=run_folder)
  same = jax.tree.map(lambda a, b: (a == b).all(), policy.weights, weights)
  assert jax.tree.all(same)
  source = tokens_lib.from_traffic(CFG, 100)
  norm = np.array(weights['final_norm'])
  norm[3:4].view(np.int32)[0] ^= 1

  class Wrong(mismatch_run._Arm):

    def compare(self, *args):
      wrong = self.weights | {'final_norm': jax.numpy.asarray(norm)}
      self.weights = self._spread = wrong
      return super().compare(*args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mismatch_run, '_Arm', Wrong)
    report = mismatch_run.measure(policy, source)
  assert report['verdict'] != 'exact' and report['route_flips'] == 0
  assert 0 < report['unequal_bits'] == report['gradient']['unequal_bits']
  assert not mismatch_run.holds(report, False)


def write_logs(path, trajectories, change=lambda i, line: None):
  with open(path, 'w') as file:
    for i, t in enumerate(trajectories):
      logprobs = [
          float(p) if s else None for p, s in zip(t.logp_behavior, t.sampled)
      ]
      line = dict(tokens=t.tokens.tolist(), logprobs=logprobs)
      if i != 1:
        line['routes'] = t.routes.tolist()
      change(i, line)
      file.write(json.dumps(line) + '\n\n')


def test_against_our_own_logs(run_folder, logged, tmp_path):
  _, trajectories = logged
  logs = tmp_path / 'logs.jsonl'
  write_logs(logs, trajectories)
  words = [f'--checkpoint={run_folder}/checkpoints/rl/3', f'--against={logs}']
  code, report = mismatch(tmp_path, *words)
  drawn = int(sum(t.sampled.sum() for t in trajectories))
  assert code == 0 and report['verdict'] == 'exact'
  assert report['positions'] == drawn
  routed = sum(len(t.tokens) - 1 for i, t in enumerate(trajectories) if i != 1)
  assert report['routed_tokens'] == routed

  place = int(trajectories[2].sampled.argmax())

  def change(i, line):
    if i == 2:
      line['logprobs'][place] -= 0.5
      expert = line['routes'][4][1][0]
      line['routes'][4][1][0] = (expert + 1) % CFG.experts

  write_logs(logs, trajectories, change)
  code, report = mismatch(tmp_path, *words)
  assert (report['unequal_bits'], report['route_flips']) == (1, 1)
  assert report['max_abs_dlogp'] == pytest.approx(0.5)
  (bucket,) = [b for b in report['buckets'] if b['unequal_bits']]
  assert bucket['from'] <= place < bucket['to']
  assert report['flip_rate_by_layer'] == [0, 1 / (2 * routed)]
  # Other weights: everything differs.
  words[0] = f'--checkpoint={run_folder}/checkpoints/rl/2'
  _, report = mismatch(tmp_path, *words)
  assert report['unequal_bits'] > 0.9 * drawn


# Sources.


def test_the_tokens_of_a_text(run_folder):
  tokenizer = tokenizer_lib.Tokenizer.load(run_folder / 'tokenizer.json')
  text = TEXT * 20
  source = tokens_lib.from_text(text, tokenizer, CFG, 10_000)
  assert not source.drawn
  pieces = []
  for script in source.scripts:
    assert script.length <= 64 and len(script.forced) == sum(script.draws)
    left, tokens = list(script.forced), list(script.prompt)
    reads = [*script.observations, ()]
    for count, read in zip(script.draws, reads, strict=True):
      tokens += left[:count] + list(read)
      left = left[count:]
    assert tokens[0] == tokenizer.bos
    pieces.append(tokenizer.decode(tokens[1:]))
  # Reads after the last draw are left out; the first, fifth, ... come again.
  number = len(pieces) * 4 // 5
  once, again = pieces[:number], pieces[number:]
  assert again == once[::4] and len(once) > 5
  for one, two in zip(source.scripts[::4], source.scripts[number:]):
    assert len(two.prompt) > len(one.prompt)
    assert one.forced[len(one.forced) // 2 :] == two.forced
  assert sum(map(len, once)) > 0.8 * len(text)
  at = 0
  for piece in once:
    assert (found := text.find(piece, at)) >= at
    at = found + len(piece)
  few = tokens_lib.from_text(text, tokenizer, CFG, 50)
  assert 50 <= few.positions < 50 + 64


def test_a_text_through_the_engine(run_folder, tmp_path):
  path = tmp_path / 'text.txt'
  path.write_text(TEXT * 8)
  code, report = mismatch(tmp_path, f'--workdir={run_folder}', f'--text={path}')
  assert code == 0 and report['verdict'] == 'exact'
  assert 'text of' in report['tokens']['origin']


def test_logged_tokens_are_forced_as_they_were(logged, run_folder):
  _, trajectories = logged
  files = tokens_lib.newest_trajectories(run_folder)
  assert [p.name for p in files] == ['rl-000003.jsonl.gz', 'rl-000002.jsonl.gz']
  source = tokens_lib.from_trajectories(files, CFG, 10**6)
  read = trajectories[1:] + trajectories[:1]  # as the files are
  drawn = [int(t.sampled.sum()) for t in read]
  again = [n - n // 2 for n in drawn[::4]]  # the second half of some
  assert source.positions == sum(drawn) + sum(again)
  assert len(source.scripts) == len(drawn) + len(again)
  by_prompt = {(s.prompt, s.forced) for s in source.scripts}
  for t in trajectories:
    first = int(t.sampled.argmax())
    forced = tuple(t.tokens[t.sampled].tolist())
    assert (tuple(t.tokens[:first].tolist()), forced) in by_prompt
  few = tokens_lib.from_trajectories(files, CFG, 1)
  assert (
      len(few.scripts) == 2 and few.scripts[1].length == few.scripts[0].length
  )
  both = tokens_lib.trajectory_files(
      f'{files[0]},{run_folder}/traj*/*2.jsonl.gz'
  )
  assert both == files


def test_the_part_of_a_checkpoint(run_folder):
  """Reading neither writes nor needs the optimizer's shape."""
  folder = run_folder / 'checkpoints' / 'rl'
  half = folder / '4.orbax-checkpoint-tmp-9'
  half.mkdir(exist_ok=True)  # another process is writing it
  names = sorted(str(p) for p in folder.rglob('*'))
  like = jax.eval_shape(lambda: samples.weights(CFG))
  for asked, want in ((None, 3), (2, 2)):
    step, tree, state = checkpoint.read_part(folder, 'weights', like, asked)
    assert (step, state) == (want, {})
    expected = checkpoint.params_sha256(samples.weights(CFG, want == 3))
    assert checkpoint.params_sha256(tree) == expected
  assert sorted(str(p) for p in folder.rglob('*')) == names
  half.rmdir()
  with pytest.raises(checkpoint.MismatchError, match='of another policy'):
    checkpoint.read_part(folder, 'weights', {'w': np.zeros(3)})
  with pytest.raises(checkpoint.CheckpointError, match=r'checkpoint 7 .*2, 3'):
    checkpoint.read_part(folder, 'weights', like, 7)


def test_a_damaged_checkpoint(run_folder, tmp_path):
  folder = tmp_path / 'rl'
  shutil.copytree(run_folder / 'checkpoints' / 'rl', folder)
  # Every file: the weights may lie in the sound half of any one of them.
  for part in (folder / '3' / 'tree').rglob('*'):
    if part.is_file():
      part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
  like = jax.eval_shape(lambda: samples.weights(CFG))
  with pytest.raises(checkpoint.CheckpointError, match='3 .* is corrupt'):
    checkpoint.read_part(folder, 'weights', like)


# Bad input: a message, exit code 2.


def refused(capsys, *words):
  assert verify.main(['mismatch', *map(str, words)]) == 2
  said, _, message = capsys.readouterr().err.strip().rpartition('error: ')
  assert message and (not said or said.endswith('\n'))
  return message


@pytest.mark.parametrize(
    ('words', 'expected'),
    [
        (['--config=configs/sve.py'], ['configs/sve.py', 'configs/swe.py']),
        (['--config.policy.layer=3'], ["'policy.layer'", 'policy.layers']),
        (['--config.policy.layers=x'], ['policy.layers', "int, not 'x'"]),
        (['--config.policy=3'], ["'policy' holds fields"]),
        (['--confg.seed=3'], ["'--confg.seed=3'", '--config.FIELD=VALUE']),
        (['--config.seed=-1', '--fresh'], ['seed=-1', '0 or more']),
        (
            ['--config.rollout.max_sequences=0', '--fresh'],
            ['rollout.max_sequences=0'],
        ),
        (
            ['--workdir=/no/such'],
            ['/no/such is no work directory', '/no/such/config.json'],
        ),
        (['--checkpoint=/no/such'], ['/no/such']),
        (['--fresh', '--text=/no/such'], ['/no/such']),
        (
            ['--fresh', '--trajectories=/no/such*'],
            ["trajectories='/no/such*'", 'no such file'],
        ),
        (['--fresh', '--against=/no/such'], ['/no/such']),
        (['--fresh', '--json=/no/such/x'], ['/no/such/x']),
        (['--fresh', '--html=/no/such/x'], ['/no/such/x']),
        (
            ['--fresh', '--control', '--config.policy.exact=False'],
            ['policy.exact=False', 'policy.exact=True'],
        ),
    ],
)
def test_bad_input(words, expected, capsys):
  message = refused(capsys, *FLAGS, *words)
  for word in expected:
    assert word in message


@pytest.mark.parametrize(
    'words',
    [
        ['--text=a', '--trajectories=b'],
        ['--workdir=a', '--checkpoint=b'],
        ['--against=a', '--control'],
        ['--positions=0'],
    ],
)
def test_words_that_exclude_each_other(words, capsys):
  with pytest.raises(SystemExit) as error:
    verify.main(['mismatch', *words])
  assert error.value.code == 2
  assert words[-1].partition('=')[0] in capsys.readouterr().err


@pytest.mark.parametrize('value', ['0', '-3', 'many'])
def test_what_is_no_number_of_positions(value, capsys):
  with pytest.raises(SystemExit):
    verify.main(['mismatch', '--fresh', f'--positions={value}'])
  told = capsys.readouterr().err
  assert f'--positions: {value!r}: allowed is 1 or more' in told


def test_a_run_of_another_shape(run_folder, capsys):
  message = refused(
      capsys, f'--workdir={run_folder}', '--config.policy.experts=2'
  )
  assert 'checkpoint 3 is of another policy' in message


@pytest.mark.parametrize(
    ('path', 'value', 'expected'),
    [
        ('policy', None, 'no fields policy'),
        ('policy', 3, 'no fields policy'),
        ('seed', 'x', "'seed' is int (0), not str ('x')"),
        ('mesh', 8, "'mesh' is str ('')"),
        ('policy.layers', '4', "'policy.layers' is int (4)"),
        ('sampling.temperature', None, "'sampling.temperature' is float (1.0)"),
    ],
)
def test_a_damaged_config(path, value, expected, run_folder, tmp_path, capsys):
  saved = json.loads((run_folder / 'config.json').read_text())
  *parents, last = path.split('.')
  node = saved
  for name in parents:
    node = node[name]
  node[last] = value
  (tmp_path / 'config.json').write_text(json.dumps(saved))
  words = [f'--workdir={tmp_path}', '--config=configs/swe.py:debug']
  message = refused(capsys, *words)
  assert f'{tmp_path}/config.json: ' in message and expected in message


def test_a_config_of_an_older_run(run_folder, tmp_path):
  """A field may be missing, a whole number be a float."""
  saved = json.loads((run_folder / 'config.json').read_text())
  del saved['mesh'], saved['learner']['correction']
  saved['sampling']['temperature'] = 1
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(saved))
  like = common.load('configs/swe.py')
  common.check_kinds(common.load_resolved(path), like, path)


def test_a_text_that_is_none(tmp_path, capsys):
  path = tmp_path / 'text'
  path.write_bytes(b'\xff\xfe')
  assert f'{path} is no text in UTF-8' in refused(capsys, f'--text={path}')


GOOD = dict(tokens=[1, 2, 3], logprobs=[None, -1.5, None])


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ('{', 'Expecting property name'),
        ('[1]', "the keys 'tokens' and 'logprobs'"),
        (dict(tokens='abc'), "'tokens' must be a list of integers"),
        (dict(tokens=[1, True, 3]), "'tokens' must be a list of integers"),
        (dict(tokens=[1, 260, 3]), 'token 260; allowed are 0 to 259'),
        (dict(tokens=[1], logprobs=[None]), '1 tokens; allowed are 2 to'),
        (dict(logprobs=[None, -1.5]), "'logprobs' must be a list of 3"),
        (dict(logprobs=[-1.0, -1.5, None]), r"'logprobs'\[0\] must be null"),
        (dict(logprobs=[None, 0.5, None]), r"'logprobs'\[1\] is 0.5"),
        (dict(logprobs=[None, float('nan'), None]), r"'logprobs'\[1\] is nan"),
        (dict(logprobs=[None, '-1', None]), r"'logprobs'\[1\] is '-1'"),
        (dict(logprobs=[None, -1e300, None]), r"'logprobs'\[1\] is -1e\+300"),
        ('[' * 10**5, 'maximum recursion depth'),
        (dict(routes=[[[0, 1]]]), r"'routes' must be integers of shape"),
        (dict(routes=[[[0, 1]], [[0]]]), r"'routes' must be integers of shape"),
        (
            dict(routes=[[[0, 4]] * 2] * 3),
            "'routes' holds 4; allowed are -1 to",
        ),
    ],
)
def test_malformed_logs(change, message, tmp_path):
  path = tmp_path / 'logs.jsonl'
  bad = change if isinstance(change, str) else json.dumps(GOOD | change)
  path.write_text(f'{json.dumps(GOOD)}\n\n{bad}\n')
  with pytest.raises(ValueError, match=f'{path} line 3: .*{message}'):
    tokens_lib.read_foreign(path, CFG)


def test_logs_without_a_log_prob(tmp_path):
  path = tmp_path / 'logs.jsonl'
  path.write_text(json.dumps(GOOD | dict(logprobs=[None] * 3)))
  with pytest.raises(ValueError, match='no log-prob is known in 1 lines'):
    tokens_lib.read_foreign(path, CFG)


@pytest.mark.parametrize(
    'content',
    [
        b'', b'no gzip', b'\x1f\x8b\x08broken', gzip.compress(b'[' * 10**5),
        gzip.compress(b'{"tokens": [99999999999]}'),
    ],
    ids=['empty', 'no gzip', 'broken gzip', 'broken json', 'an impossible token'],
)  # fmt: skip
def test_damaged_trajectories(content, tmp_path):
  path = tmp_path / 'rl-000001.jsonl.gz'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=str(path)):
    tokens_lib.from_trajectories([path], CFG, 9)


def test_trajectories_of_a_longer_context(logged, run_folder):
  files = tokens_lib.newest_trajectories(run_folder)
  short = dataclasses.replace(CFG, max_context=16)
  with pytest.raises(ValueError, match='trajectory .* policy.max_context=16'):
    tokens_lib.from_trajectories(files, short, 10**6)


def test_the_table_shows_what_is_unknown():
  report = mismatch_lib.summary(
      mismatch_lib.Compared(
          sequences_P=np.array([0, 0]),
          contexts_P=np.array([3, 20]),
          sampler_P=np.array([-1, -2], np.float32),
          learner_P=np.array([-1, -1.75], np.float32),
          hits_P=np.zeros(0),
          route_contexts_R=np.zeros(0, int),
          flips_RL=np.zeros((0, 0), np.int16),
          slots=2,
      )
  )
  report['gradient'] = dict(unequal_bits=3, route_flips=0, max_abs_dlogp=0.25)
  report['policy'] = dict(
      origin='<b>', layers=2, width=8, experts=0, precision='float32',
      exact=True, impl='auto', platform='cpu',
  )  # fmt: skip
  report['tokens'] = dict(origin='x', sequences=2, drawn_by_policy=False)
  text = mismatch_report.table(report)
  assert re.search(r'top-k hit rate +-\n', text)
  assert re.search(r'16-31 +1 +1 +- +0.034', text)
  assert re.search(r'routes that differ +-\n', text)
  assert '3 unequal, - routes differ' in text
  assert text.endswith('; no route was compared)')
  page = mismatch_report.page(report)
  assert '; no route was compared; 1 unequal log-probs and -' in page
  assert '&lt;b&gt;' in page and '<b>;' not in page
