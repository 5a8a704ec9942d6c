"""Benchmarks.

  python launch/bench.py invariance [--config=configs/swe.py] [--json=FILE]
  python launch/bench.py kernels --chip=v5e|v6e [--only=OP,OP] [--json=FILE]
  python launch/bench.py device [--json=FILE]
  python launch/bench.py context [--chip=v5e] [--contexts=4096,32768]
      [--json=FILE]

`invariance` prints tokens per second of sampler and learner, and how much
slower they are than the same code without exactness. The exit code is 1 when a
ratio is above `--limit`.

`kernels` compares our TPU kernels with JAX's own on the same work. It needs no
TPU: it counts the VLIW bundles that the real compiler's programs issue. It takes
minutes; `--only` takes parts of the names of cases. A goal that is missed is
marked and is no error; the exit code is 1 when a case could not be measured.

`device` is one prepared run, below 8 minutes, for a machine with an accelerator:
whether results are equal to the bit there, and how fast the kernels are beside
the best that make no such promise. On CPU it runs tiny shapes, to show that it
works. The exit code is 1 when a bit differs or a case fails.

`context` prints what attention costs at contexts of 4k to 1M tokens: pages read
per token, and temporaries of the programs that the TPU compiler makes. The exit
code is 1 when a window or block-sparse layer reads more pages at a longer
context, or a program holds a float32 number for each token and page.

`--json=FILE` writes the figures ('-': standard output).
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from configs import common
from launch import reports


def _invariance(args):
  config = common.load(args.config)
  from agentic_rl import setup_run
  from agentic_rl.diagnostics import invariance
  from agentic_rl.policy import config as policy_config

  setup_run.reuse_freed_memory()
  cfg = policy_config.PolicyConfig(
      vocab=config.tokenizer.vocab_size, **dict(config.policy.items())
  )
  report = invariance.measure(
      cfg,
      sequences=config.rollout.max_sequences,
      engines=config.rollout.engines,
      rows=config.learner.rows,
      row_tokens=config.learner.row_tokens,
      rounds=args.rounds,
      note=reports.note,
  )
  names = ('sampler_ratio', 'learner_ratio')
  report['holds'] = holds = all(report[n] <= args.limit for n in names)
  text = '\n'.join(
      f'{k:28s} {v:.4g}' if isinstance(v, float) else f'{k:28s} {v}'
      for k, v in report.items()
  )
  return report, text, holds


def _kernels(args):
  from agentic_rl.diagnostics import kernel_bench

  cases = kernel_bench.select(args.only)
  results, failures = kernel_bench.measure(
      args.chip, cases, note=reports.note
  )
  text = kernel_bench.table(results, failures)
  return [r.row() for r in results], text, not failures


def _device(args):
  del args
  from agentic_rl.diagnostics import device_bench

  report = device_bench.measure(note=reports.note)
  return report, device_bench.table(report), report['holds']


def _context(args):
  from agentic_rl.diagnostics import context_cost

  contexts = list(context_cost.CONTEXTS)
  if args.contexts:
    contexts = [int(n) for n in args.contexts.split(',')]
  rows, faults = context_cost.measure(
      args.chip,
      contexts,
      note=reports.note,
  )
  text = context_cost.table(rows, faults)
  return context_cost.as_json(rows), text, not faults


def _parse(argv):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(required=True)
  bench = commands.add_parser('invariance')
  bench.set_defaults(run=_invariance)
  bench.add_argument('--config', default='configs/swe.py')
  bench.add_argument('--rounds', type=int, default=9)
  bench.add_argument('--limit', type=float, default=1.3)
  kernels = commands.add_parser('kernels')
  kernels.set_defaults(run=_kernels)
  kernels.add_argument('--chip', required=True, metavar='v5e|v6e')
  kernels.add_argument('--only', default='', metavar='OP,OP')
  device = commands.add_parser('device')
  device.set_defaults(run=_device)
  context = commands.add_parser('context')
  context.set_defaults(run=_context)
  context.add_argument('--chip', default='v5e')
  context.add_argument('--contexts', default='', metavar='N,N')
  for command in (bench, kernels, device, context):
    reports.add_flag(command)
  return parser.parse_args(argv)


def main(argv=None) -> int:
  """Runs a benchmark; returns 0, 1 if it does not hold, 2 on bad input."""
  args = _parse(argv)
  return reports.run(lambda: args.run(args), args.json)


if __name__ == '__main__':
  sys.exit(main())
