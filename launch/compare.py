"""Compares finished runs of several seeds.

  python launch/compare.py --arm=NAME=DIR,DIR,DIR --arm=NAME=DIR,DIR,DIR
      [--metric=rollout/solved] [--x=tokens|iterations] [--points=8]
      [--png=FILE] [--json=FILE]

Each arm is a list of work directories, a run a seed, the same seeds in every
arm. Prints mean and 95 % interval over seeds of the held-out share solved and
of a metric's curve at equal sampled tokens, the differences to the first arm
paired by seed, and how far sampler and learner disagreed. `--png` draws it;
`--json=FILE` writes the figures ('-': standard output). The exit code is 2 when
a run is missing or not finished.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from agentic_rl.diagnostics import compare
from launch import reports


def _arms(words) -> dict[str, list[str]]:
  out: dict[str, list[str]] = {}
  for word in words:
    name, equals, folders = word.partition('=')
    if not (name and equals and folders):
      raise ValueError(f'--arm={word}: allowed is NAME=DIR,DIR')
    if name in out:
      raise ValueError(f'--arm={word}: there are two arms {name!r}')
    out[name] = [folder for folder in folders.split(',') if folder]
  return out


def _parse(argv):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
      '--arm', action='append', required=True, metavar='NAME=DIR,DIR'
  )
  parser.add_argument('--metric', default='rollout/solved')
  parser.add_argument('--x', default='tokens', metavar='tokens|iterations')
  parser.add_argument('--points', type=int, default=8)
  parser.add_argument('--png', default='', metavar='FILE')
  reports.add_flag(parser)
  return parser.parse_args(argv)


def main(argv=None) -> int:
  """Compares; returns 0, or 2 on bad input."""
  args = _parse(argv)

  def work():
    report = compare.compare(
        _arms(args.arm), metric=args.metric, x=args.x, points=args.points
    )
    if args.png:
      compare.plot(report, args.png)
    return report, compare.table(report), True

  return reports.run(work, args.json)


if __name__ == '__main__':
  sys.exit(main())
