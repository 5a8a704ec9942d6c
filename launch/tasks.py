"""Builds, shows, compares and checks task sets.

  python launch/tasks.py build --split=train --n=1000 --out=DIR --seed=0
  python launch/tasks.py show DIR --n=3
  python launch/tasks.py diff DIR1 DIR2
  python launch/tasks.py check DIR

`--json=FILE` writes the report as JSON ('-': standard output). Ends non-zero
when a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from agentic_rl.tasks import audit
from agentic_rl.tasks import taskset


def main(argv: list[str] | None = None) -> int:
  """Runs a command; returns 0, 1 if a check failed, 2 on bad input."""
  args = _parse(argv)
  try:
    report, text, good = args.run(args)
  except (OSError, ValueError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  if args.json == '-':
    print(json.dumps(report, indent=2))
    return 0 if good else 1
  if args.json:
    with open(args.json, 'w', encoding='utf-8') as file:
      file.write(json.dumps(report, indent=2) + '\n')
  print(text)
  return 0 if good else 1


def _build(args) -> tuple[dict[str, Any], str, bool]:
  built = audit.build(
      args.n,
      args.split,
      args.difficulty,
      seed=args.seed,
      holdout_fraction=args.holdout_fraction,
      holdout_templates=args.holdout_templates,
  )
  taskset.save(args.out, built, overwrite=args.overwrite)
  report = {'out': args.out, 'count': args.n, 'version': built.version}
  return report, f'{args.out}: {args.n} tasks, version {built.version}', True


def _show(args) -> tuple[dict[str, Any], str, bool]:
  tasks = taskset.load(args.dir).tasks[: args.n]
  shown = [{'task_id': t.task_id, 'meta': dict(t.meta)} for t in tasks]
  return {'tasks': shown}, '\n'.join(map(audit.describe, tasks)), True


def _diff(args) -> tuple[dict[str, Any], str, bool]:
  drift = taskset.drift(taskset.load(args.old), taskset.load(args.new))
  report = drift.to_json()
  text = '\n'.join(f'{k}: {len(v)}' for k, v in report.items())
  return report, text, True


def _check(args) -> tuple[dict[str, Any], str, bool]:
  report = audit.check(taskset.load(args.dir))
  lines = [f'{i}: {p}' for i, ps in report['problems'].items() for p in ps]
  lines.append(f'{report["count"]} tasks, {len(report["problems"])} unsound')
  return report, '\n'.join(lines), not report['problems']


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  commands = parser.add_subparsers(required=True)

  def command(name, run, *positional):
    out = commands.add_parser(name)
    out.set_defaults(run=run)
    for argument in positional:
      out.add_argument(argument)
    out.add_argument('--json', default='', metavar='FILE')
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


if __name__ == '__main__':
  sys.exit(main())
