"""Builds, shows, compares and checks task sets.

  python launch/tasks.py build --split=train --n=1000 --out=DIR --seed=0
  python launch/tasks.py show DIR --n=3
  python launch/tasks.py diff DIR1 DIR2
  python launch/tasks.py check DIR

`--json=FILE` writes the report as JSON ('-': standard output). The exit code
is 1 when a check fails and 2 on bad input.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from agentic_rl.tasks import audit
from agentic_rl.tasks import taskset
from launch import reports


def _build(args):
  names = 'split difficulty seed holdout_fraction holdout_templates'.split()
  built = audit.build(args.n, **{n: getattr(args, n) for n in names})
  taskset.save(args.out, built, overwrite=args.overwrite)
  report = dict(out=args.out, count=args.n, version=built.version)
  return report, f'{args.out}: {args.n} tasks, version {built.version}'


def _show(args):
  tasks = taskset.load(args.dir).tasks[: args.n]
  shown = [dict(task_id=t.task_id, meta=dict(t.meta)) for t in tasks]
  return {'tasks': shown}, '\n'.join(map(audit.describe, tasks))


def _diff(args):
  drift = taskset.drift(taskset.load(args.old), taskset.load(args.new))
  report = drift.to_json()
  return report, '\n'.join(f'{k}: {len(v)}' for k, v in report.items())


def _check(args):
  report = audit.check(taskset.load(args.dir))
  lines = [f'{i}: {p}' for i, ps in report['problems'].items() for p in ps]
  lines.append(f'{report["count"]} tasks, {len(report["problems"])} unsound')
  return report, '\n'.join(lines)


def _parse(argv):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(required=True)

  def command(name, run, *positional):
    out = commands.add_parser(name)
    out.set_defaults(run=run)
    for argument in positional:
      out.add_argument(argument)
    reports.add_flag(out)
    return out

  build = command('build', _build)
  build.add_argument('--split', default='train')
  build.add_argument('--n', type=int, default=1000)
  build.add_argument('--out', required=True)
  build.add_argument('--seed', type=int, default=0)
  build.add_argument('--difficulty', default='default')
  build.add_argument('--holdout_fraction', type=float, default=0.1)
  build.add_argument('--holdout_templates', type=int, default=0)
  build.add_argument('--overwrite', action='store_true')
  command('show', _show, 'dir').add_argument('--n', type=int, default=3)
  command('diff', _diff, 'old', 'new')
  command('check', _check, 'dir')
  return parser.parse_args(argv)


def main(argv=None) -> int:
  """Runs a command; returns 0, 1 if a check failed, 2 on bad input."""
  args = _parse(argv)

  def work():
    report, text = args.run(args)
    return report, text, not report.get('problems')

  return reports.run(work, args.json)


if __name__ == '__main__':
  sys.exit(main())
