"""Compares finished runs: arms that differ in something, a run per seed each.

Reads work directories (`config.json`, `metrics.jsonl`, `summary.json`). Curves
are aligned at equal sampled tokens: the range that every run covers is cut into
equal parts, and a run's value in a part is the mean of the iterations that
ended in it. Means over seeds come with a two-sided 95 % interval of Student's t,

  m ± t(n - 1, .975) · s / √n,

which with three seeds is 4.3 standard errors on either side. Differences to the
first arm are paired by seed. Every evaluation solves the same held-out tasks
with the same random streams, so the last one is also compared task by task:
that interval, of the normal distribution, holds for these seeds only. Knows no
JAX.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import statistics
from typing import Any, Mapping, Sequence

import numpy as np
from scipy import special

from agentic_rl import metrics as metrics_lib
from agentic_rl.rollout import journal
from configs import common

AXES = {'tokens': 'rollout/sampled_tokens', 'iterations': None}
# Runs of an arm may differ in these.
_OWN = ('seed', 'warm_start.weights')
_FREE = ('env_pool', 'checkpoint', 'alerts', 'rollout.engines')
_HELDOUT = ('before', 'after', 'gain')
FIGURES = (*_HELDOUT, 'mean', 'last')


@dataclasses.dataclass(frozen=True)
class Run:
  """What is compared of a finished run.

  Attributes:
    workdir: as given.
    seed: of its config.
    fields: leaves of its config by path.
    x: float64 [I], tokens or iterations at the end of each iteration.
    y: float64 [I], the metric; nan where an iteration lacks it.
    before: held-out share solved at the start; after: at the end.
    solved: at the end, by task id.
    unequal_share: of the compared log-probs, in all iterations.
    max_abs_dlogp: largest difference of a log-prob, sampler against learner.
    flip_rate: share of routes that flipped, mean over iterations.
  """

  workdir: str
  seed: int
  fields: Mapping[str, Any]
  x: np.ndarray
  y: np.ndarray
  before: float
  after: float
  solved: Mapping[str, bool]
  unequal_share: float
  max_abs_dlogp: float
  flip_rate: float


def read(workdir: str, metric: str, x: str = 'tokens') -> Run:
  """Reads a finished run.

  Args:
    workdir: of the run.
    metric: of the phase 'rl'.
    x: key of `AXES`.

  Raises:
    ValueError: there is no run, it is not finished, or lacks the metric.
  """
  folder = pathlib.Path(workdir)
  if x not in AXES:
    raise ValueError(f'x={x!r}: allowed are {sorted(AXES)}')
  if not (folder / 'config.json').is_file():
    raise ValueError(f'{workdir}: no work directory of a run')
  if not (folder / metrics_lib.SUMMARY).is_file():
    raise ValueError(
        f'{workdir}: the run is not finished; the same command with'
        f' --workdir={workdir} resumes it'
    )
  summary = json.loads((folder / metrics_lib.SUMMARY).read_text())
  rows = metrics_lib.read_rows(folder, 'rl')
  known = sorted({k for row in rows for k in row if '/' in k or k == 'loss'})
  if metric not in known:
    raise ValueError(f'metric {metric!r} in {workdir}: there are {known}')
  of = lambda key: np.array([row.get(key, np.nan) for row in rows], float)
  counts = AXES[x]
  compared = of('mismatch/compared')
  fields = common.fields(common.load_resolved(folder / 'config.json'))
  return Run(
      workdir=str(workdir),
      seed=fields['seed'],
      fields=fields,
      x=of('step') if counts is None else of(counts).cumsum(),
      y=of(metric),
      before=summary['heldout_solve_before'],
      after=summary['heldout_solve_after'],
      solved=_solved(journal.path_of(folder, 'after', summary['iterations'])),
      unequal_share=float(
          np.nansum(of('mismatch/unequal_bits')) / max(1, np.nansum(compared))
      ),
      max_abs_dlogp=float(np.nanmax(of('mismatch/max_abs_dlogp'))),
      flip_rate=float(np.nanmean(of('router/flip_rate'))),
  )


def _solved(path: pathlib.Path) -> dict[str, bool]:
  """Returns what the sampled evaluation solved; the greedy one comes later."""
  out: dict[str, bool] = {}
  for trajectory in journal.read(path):
    if not trajectory.failed:
      out.setdefault(trajectory.task_id, bool(trajectory.info['solved']))
  return out


def by_task(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
  """Compares runs on each held-out task that both have done.

  Args:
    pairs: a run of the first arm and one of another, of the same seed.

  Returns:
    mean, low and high of the difference of the share solved, with the 95 %
    interval m ± 1.96 s / √n over n = `tasks` differences of -1, 0 or 1; how
    many only the first solved, and how many only the other.
  """
  gaps = [
      int(other.solved[task]) - int(first.solved[task])
      for first, other in pairs
      for task in first.solved.keys() & other.solved.keys()
  ]
  mean = statistics.fmean(gaps)
  half = 1.96 * statistics.stdev(gaps) / len(gaps) ** 0.5
  return {
      'mean': mean,
      'low': mean - half,
      'high': mean + half,
      'tasks': len(gaps),
      'only_first': gaps.count(-1),
      'only_other': gaps.count(1),
  }


def interval(values: Sequence[float]) -> dict[str, Any]:
  """Returns mean, low and high of a 95 % t interval over seeds.

  Args:
    values: one a seed; of a single one low and high are None.
  """
  array = np.asarray(values, float)
  mean, n = float(array.mean()), len(array)
  if n < 2:
    return {'mean': mean, 'low': None, 'high': None}
  half = special.stdtrit(n - 1, 0.975) * array.std(ddof=1) / n**0.5
  return {'mean': mean, 'low': float(mean - half), 'high': float(mean + half)}


def parts(run: Run, end: float, points: int) -> np.ndarray:
  """Returns float64 [points], a run's means over equal parts of (0, end].

  Raises:
    ValueError: no iteration with a value ended in a part.
  """
  place = np.ceil(run.x / end * points).astype(int) - 1
  out = np.empty(points)
  for i in range(points):
    inside = run.y[(place == i) & np.isfinite(run.y)]
    if not len(inside):
      raise ValueError(
          f'{run.workdir}: no iteration in part {i + 1} of {points}; fewer'
          ' parts are needed'
      )
    out[i] = inside.mean()
  return out


def compare(
    arms: Mapping[str, Sequence[str]],
    *,
    metric: str = 'rollout/solved',
    x: str = 'tokens',
    points: int = 8,
) -> dict[str, Any]:
  """Compares arms; the first is what the others are measured against.

  Args:
    arms: work directories by the arm's name, a run a seed, the same seeds in
      each arm.
    metric: whose curve is compared, of the phase 'rl'.
    x: 'tokens' or 'iterations'.
    points: parts of a curve, 1 or more.

  Returns:
    JSON values: `arms` with the figures of each, `differences` to the first arm
    in before, after, gain, mean (of the curve), last (part of it) and `by_task`
    (see there), `differs` with the fields of the config in which arms differ.

  Raises:
    ValueError: runs are missing, unfinished or can not be compared.
  """
  if points < 1:
    raise ValueError(f'points={points}: allowed is 1 or more')
  runs = {
      name: sorted((read(w, metric, x) for w in folders), key=lambda r: r.seed)
      for name, folders in arms.items()
  }
  _check(runs)
  end = float(min(run.x[-1] for own in runs.values() for run in own))
  report: dict[str, Any] = {
      'metric': metric,
      'x': x,
      'end': end,
      'x_parts': [end * (i + 0.5) / points for i in range(points)],
      'seeds': [run.seed for run in next(iter(runs.values()))],
      'differs': _differs(runs),
      'arms': {name: _arm(own, end, points) for name, own in runs.items()},
      'differences': {},
  }
  first, *others = report['arms']
  for name in others:
    report['differences'][name] = {
        figure: interval(
            [
                b[figure] - a[figure]
                for a, b in zip(
                    report['arms'][first]['runs'], report['arms'][name]['runs']
                )
            ]
        )
        for figure in FIGURES
    }
    report['differences'][name]['by_task'] = by_task(
        list(zip(runs[first], runs[name]))
    )
  return report


def _arm(runs: Sequence[Run], end: float, points: int) -> dict[str, Any]:
  rows = []
  for run in runs:
    curve = parts(run, end, points)
    rows.append(
        {
            'workdir': run.workdir,
            'seed': run.seed,
            'total': float(run.x[-1]),
            'before': run.before,
            'after': run.after,
            'gain': run.after - run.before,
            'mean': float(curve.mean()),
            'last': float(curve[-1]),
            'curve': curve.tolist(),
            'unequal_share': run.unequal_share,
            'max_abs_dlogp': run.max_abs_dlogp,
            'flip_rate': run.flip_rate,
        }
    )
  column = lambda key: [row[key] for row in rows]
  return {
      'runs': rows,
      'curve': [interval(values) for values in zip(*column('curve'))],
      **{figure: interval(column(figure)) for figure in FIGURES},
      'unequal_share': float(np.mean(column('unequal_share'))),
      'max_abs_dlogp': max(column('max_abs_dlogp')),
      'flip_rate': float(np.mean(column('flip_rate'))),
  }


def _check(runs: Mapping[str, Sequence[Run]]) -> None:
  if not runs or not all(runs.values()):
    raise ValueError(f'arms {list(runs)}: each needs a work directory or more')
  first = next(iter(runs))
  for name, own in runs.items():
    seeds, wanted = [r.seed for r in own], [r.seed for r in runs[first]]
    if len(set(seeds)) < len(seeds):
      raise ValueError(f'arm {name!r}: seeds {seeds}; a run a seed is needed')
    if seeds != wanted:
      raise ValueError(
          f'arm {name!r} has the seeds {seeds}, arm {first!r} {wanted}; the'
          ' same are needed'
      )
    for run in own[1:]:
      for path in _unequal(own[0].fields, run.fields):
        raise ValueError(
            f'arm {name!r}: {path} is {own[0].fields.get(path)!r} in'
            f' {own[0].workdir}, {run.fields.get(path)!r} in {run.workdir}'
        )


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
  """Returns the paths that differ and matter."""
  return [
      path
      for path in sorted(a.keys() | b.keys())
      if a.get(path) != b.get(path)
      and path not in _OWN
      and not any(path == f or path.startswith(f'{f}.') for f in _FREE)
  ]


def _differs(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
  """Returns the values of each arm of the fields that are not the same."""
  fields = {name: own[0].fields for name, own in runs.items()}
  base = next(iter(fields.values()))
  paths = {p for other in fields.values() for p in _unequal(base, other)}
  return {
      path: {name: own.get(path) for name, own in fields.items()}
      for path in sorted(paths)
  }


# ----------------------------------------------------------------------- text


def table(report: Mapping[str, Any]) -> str:
  """Returns the report as text, shares in percent."""
  n = len(report['seeds'])
  lines = [
      f'{report["metric"]} over {report["end"]:,.0f} {report["x"]}, seeds'
      f' {report["seeds"]}',
      f'[95 % t interval over {n} seeds'
      + f', ± {special.stdtrit(n - 1, 0.975):.2f} standard errors' * (n > 1)
      + ']',
  ]
  for path, values in report['differs'].items():
    lines.append(f'{path}: ' + ', '.join(f'{a} {v}' for a, v in values.items()))
  heads = ('held-out before', 'after', 'gain', 'curve mean', 'last part')
  lines += ['', _line('arm', heads)]
  for name, arm in report['arms'].items():
    lines.append(_line(name, [_cell(arm[f]) for f in FIGURES]))
  if report['differences']:
    lines += ['', f'difference to {next(iter(report["arms"]))}, paired by seed']
  for name, figures in report['differences'].items():
    lines.append(_line(name, [_cell(figures[f]) for f in FIGURES]))
  for name, figures in report['differences'].items():
    tasks = figures['by_task']
    lines.append(
        f'{name:12s}held-out after, task by task: {_cell(tasks)};'
        f' {tasks["tasks"]} pairs, {tasks["only_first"]} solved by the first'
        f' only, {tasks["only_other"]} by this only'
    )
  lines += ['', 'sampler against learner']
  for name, arm in report['arms'].items():
    lines.append(
        f'{name:22s} unequal log-probs {arm["unequal_share"]:.2%}, largest'
        f' difference {arm["max_abs_dlogp"]:.3g}, flipped routes'
        f' {arm["flip_rate"]:.3%}'
    )
  return '\n'.join(lines)


def _line(name: str, cells: Sequence[str]) -> str:
  return f'{name:12s}' + ''.join(f'{cell:>22s}' for cell in cells)


def _cell(value: Mapping[str, Any]) -> str:
  text = f'{100 * value["mean"]:.1f}'
  if value['low'] is not None:
    text += f' [{100 * value["low"]:.1f}, {100 * value["high"]:.1f}]'
  return text


# ----------------------------------------------------------------------- plot


def plot(report: Mapping[str, Any], path: str) -> None:
  """Draws curves and held-out shares: seeds thin, means thick.

  Args:
    report: from `compare`.
    path: the PNG file, written whole or not at all.

  Raises:
    OSError: the file can not be written.
  """
  from matplotlib import figure
  from matplotlib.backends import backend_agg

  fig = figure.Figure(figsize=(9.0, 3.6), layout='constrained')
  backend_agg.FigureCanvasAgg(fig)
  curves, heldout = fig.subplots(1, 2, width_ratios=(2, 1))
  for i, (name, arm) in enumerate(report['arms'].items()):
    color = f'C{i}'
    for run in arm['runs']:
      curves.plot(
          report['x_parts'], run['curve'], color=color, alpha=0.3, linewidth=0.8
      )
      ends = [run['before'], run['after']]
      heldout.plot([0, 1], ends, color=color, alpha=0.3, linewidth=0.8)
    mean = [point['mean'] for point in arm['curve']]
    style = dict(color=color, linewidth=2, marker='.', label=name)
    curves.plot(report['x_parts'], mean, **style)
    ends = [arm['before']['mean'], arm['after']['mean']]
    heldout.plot([0, 1], ends, **style)
  curves.set_title(report['metric'], fontsize=10)
  label = 'sampled tokens' if report['x'] == 'tokens' else 'iterations'
  curves.set_xlabel(label, fontsize=9)
  curves.set_xlim(0, report['end'])
  heldout.set_title('held-out, solved', fontsize=10)
  heldout.set_xticks([0, 1], ['before', 'after'])
  heldout.set_xlim(-0.2, 1.2)
  for axes in (curves, heldout):
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
  curves.legend(fontsize=8)
  buffer = io.BytesIO()
  fig.savefig(buffer, format='png', dpi=110)
  metrics_lib.write_atomically(path, buffer.getvalue())
