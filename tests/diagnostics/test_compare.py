"""Comparing runs: hand-computed figures on small work directories."""

import json

import numpy as np
import pytest

from agentic_rl import types
from agentic_rl.diagnostics import compare
from agentic_rl.rollout import journal
from configs import common
from configs import swe
from launch import compare as command

T_2 = 4.302652729911275  # two degrees of freedom, .975
T_1 = 12.706204736432095


def trajectory(number, task, solved):
  return types.Trajectory(
      rollout_id=number,
      task_id=task,
      seed=0,
      tokens=np.zeros(1, np.int32),
      sampled=np.zeros(1, bool),
      logp_behavior=np.zeros(1, np.float32),
      routes=None,
      weight_version=0,
      turns=(),
      status=types.Status.SUBMITTED,
      reward=float(solved),
      info={'solved': solved},
  )


def workdir(folder, seed, solved, tokens, ends, values=None, unequal=0):
  """Writes what `compare` reads of a finished run."""
  folder.mkdir()
  config = common.override(swe.get_config(), {'seed': seed, **(values or {})})
  common.save_resolved(config, folder / 'config.json')
  rows = [
      {
          'step': i + 1,
          'phase': 'rl',
          'rollout/solved': y,
          'rollout/sampled_tokens': n,
          'mismatch/compared': 10,
          'mismatch/unequal_bits': unequal,
          'mismatch/max_abs_dlogp': 0.25 * unequal * i,
          'router/flip_rate': 0.1 * unequal * i,
      }
      for i, (y, n) in enumerate(zip(solved, tokens))
  ]
  rows.insert(1, {'step': 1, 'phase': 'rl', 'alert': 'x', 'value': 1})
  rows.append({'step': 4, 'phase': 'heldout', 'solve': ends[1]})
  text = '\n'.join(map(json.dumps, rows)) + '\n'
  (folder / 'metrics.jsonl').write_text(text)
  summary = dict(zip(('heldout_solve_before', 'heldout_solve_after'), ends))
  summary['iterations'] = len(solved)
  # Ten tasks, the first solved, then greedily all of them again.
  journal.write(
      journal.path_of(folder, 'after', len(solved)),
      [
          trajectory(i, f't{i % 10}', i >= 10 or i < 10 * ends[1])
          for i in range(20)
      ],
  )
  (folder / 'summary.json').write_text(json.dumps(summary))
  return str(folder)


@pytest.fixture
def arms(tmp_path):
  control = {'policy.exact': False}
  return {
      'exact': [
          # By tokens 100, 200, 300, 400: two iterations in each half.
          workdir(tmp_path / 'a0', 0, [0, 0.2, 0.4, 0.6], [100] * 4, (0.2, 0.5)),
          workdir(tmp_path / 'a1', 1, [0.1] * 4, [100] * 4, (0.3, 0.4)),
      ],
      'control': [
          # By 150, 200, 400 and 500, beyond the end.
          workdir(
              tmp_path / 'b1',
              1,
              [0.2, 0.4, 0.5, 1.0],
              [150, 50, 200, 100],
              (0.3, 0.6),
              control,
              unequal=2,
          ),
          workdir(
              tmp_path / 'b0', 0, [0.1] * 4, [100] * 4, (0.1, 0.5), control
          ),
      ],
  }  # fmt: skip


def close(got, mean, half=None):
  assert got['mean'] == pytest.approx(mean)
  if half is None:
    assert got['low'] is got['high'] is None
  else:
    assert (got['low'], got['high']) == pytest.approx(
        (mean - half, mean + half)
    )


def test_interval():
  # s² = ((-1)² + 0² + 1²) / 2 = 1.
  close(compare.interval([1.0, 2.0, 3.0]), 2.0, T_2 / 3**0.5)
  close(compare.interval([0.5]), 0.5)


def test_figures(arms):
  report = compare.compare(arms, points=2)
  assert report['seeds'] == [0, 1] and report['end'] == 400
  assert report['x_parts'] == [100, 300]
  exact, control = report['arms']['exact'], report['arms']['control']
  assert [r['curve'] for r in exact['runs']] == [
      pytest.approx([0.1, 0.5]), pytest.approx([0.1, 0.1]),
  ]  # fmt: skip
  # Paired by seed, in whatever order they are named.
  assert [r['seed'] for r in control['runs']] == [0, 1]
  assert control['runs'][1]['curve'] == pytest.approx([0.3, 0.5])
  assert control['runs'][1]['total'] == 500
  # Of two values a, b: s / √2 = |a - b| / 2.
  close(exact['before'], 0.25, T_1 * 0.05)
  close(exact['gain'], 0.2, T_1 * 0.1)
  close(exact['curve'][1], 0.3, T_1 * 0.2)
  close(exact['mean'], 0.2, T_1 * 0.1)
  difference = report['differences']['control']
  close(difference['after'], 0.1, T_1 * 0.1)  # 0, .2
  close(difference['gain'], 0.15, T_1 * 0.05)  # .1, .2
  close(difference['last'], 0.0, T_1 * 0.4)  # -.4, .4
  close(difference['mean'], 0.05, T_1 * 0.25)  # -.2, .3
  # Seed 0: .5 and .5 of ten tasks; seed 1: .4 and .6, so two of 20 more.
  # s² = (2 · .9² + 18 · .1²) / 19.
  tasks = difference['by_task']
  half = 1.96 * ((2 * 0.9**2 + 18 * 0.1**2) / 19 / 20) ** 0.5
  close(tasks, 0.1, half)
  assert (tasks['tasks'], tasks['only_first'], tasks['only_other']) == (
      20, 0, 2,
  )  # fmt: skip
  assert report['differs'] == {
      'policy.exact': {'exact': True, 'control': False}
  }
  assert exact['unequal_share'] == exact['max_abs_dlogp'] == 0
  assert control['unequal_share'] == pytest.approx(0.1)  # 0 and 8 of 40
  assert control['max_abs_dlogp'] == 1.5
  assert control['flip_rate'] == pytest.approx(0.15)  # 0 and (0+.2+.4+.6)/4
  by_iteration = compare.compare(arms, points=4, x='iterations')
  assert by_iteration['end'] == 4
  assert by_iteration['arms']['control']['runs'][1]['curve'] == [
      0.2, 0.4, 0.5, 1.0,
  ]  # fmt: skip


def test_the_command(arms, tmp_path, capsys):
  words = [f'--arm={name}={",".join(dirs)}' for name, dirs in arms.items()]
  out, png = tmp_path / 'out.json', tmp_path / 'out.png'
  options = ['--points=2', f'--json={out}', f'--png={png}']
  assert command.main([*words, *options]) == 0
  text = capsys.readouterr().out
  assert 'policy.exact: exact True, control False' in text
  assert '95 % t interval over 2 seeds, ± 12.71 standard errors]' in text
  row = next(s for s in text.splitlines() if s.startswith('control'))
  assert '20.0 [-107.1, 147.1]' in row  # before: .1 and .3
  assert 'largest difference 1.5, flipped routes 15.000%' in text
  assert json.loads(out.read_text())['arms']['exact']['gain']['low'] < 0
  assert png.read_bytes().startswith(b'\x89PNG')
  assert 5_000 < png.stat().st_size < 150_000
  # A single run has no interval.
  single = f'--arm=one={arms["exact"][0]}'
  assert command.main([single, '--points=2', '--json=-']) == 0
  report = json.loads(capsys.readouterr().out)
  assert report['arms']['one']['after'] == {
      'mean': 0.5, 'low': None, 'high': None,
  }  # fmt: skip
  assert report['differences'] == {}


def test_what_can_not_be_compared(arms, tmp_path, capsys):
  a0, a1 = arms['exact']
  b1, b0 = arms['control']
  other = workdir(
      tmp_path / 'c', 1, [0.1], [400], (0, 0), {'learner.iterations': 9}
  )
  unfinished = workdir(tmp_path / 'd', 1, [0.1], [400], (0, 0))
  (tmp_path / 'd' / 'summary.json').unlink()
  for words, wanted in (
      ([f'a={a0},{tmp_path}/none'], 'none: no work directory'),
      ([f'a={a0},{unfinished}'], f'--workdir={unfinished} resumes it'),
      ([f'a={a0},{a0}'], 'seeds [0, 0]; a run a seed is needed'),
      ([f'a={a0},{a1}', f'b={b0}'], "'b' has the seeds [0], arm 'a' [0, 1]"),
      ([f'a={a0},{b1}'], 'policy.exact is True in'),
      ([f'a={a0},{other}'], 'learner.iterations is 64 in'),
      ([f'a={a0}', f'a={b0}'], "two arms 'a'"),
      (['a='], 'NAME=DIR,DIR'),
      ([f'a={a0}', '--metric=solved'], "'solved'"),
      ([f'a={a0}', '--x=time'], "x='time': allowed are"),
      ([f'a={a0}', '--points=5'], 'part 1 of 5; fewer'),
      ([f'a={a0}', '--points=0'], 'points=0'),
  ):
    argv = [w if w.startswith('--') else f'--arm={w}' for w in words]
    assert command.main([*argv[:1], '--points=2', *argv[1:]]) == 2, words
    said = capsys.readouterr()
    assert said.out == '' and wanted in said.err, (wanted, said.err)
  assert np.isclose(compare.read(a0, 'rollout/solved').x[-1], 400)
