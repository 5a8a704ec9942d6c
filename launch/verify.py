"""Checks what this code promises.

  python launch/verify.py mismatch [--config=configs/swe.py]
      [--fresh | --workdir=RUN | --checkpoint=DIR | --huggingface=DIR]
      [--text=FILE | --trajectories=FILES | --against=logs.jsonl]
      [--positions=50000] [--control] [--json=FILE] [--html=FILE]
      [--config.FIELD=VALUE ...]

  python launch/verify.py exactness [--config=configs/swe.py]
      [--fresh | --workdir=RUN | --checkpoint=DIR | --huggingface=DIR]
      [--positions=10000] [--meshes MESH MESH …] [--json=FILE]
      [--config.FIELD=VALUE ...]

  python launch/verify.py precision [--config=configs/swe.py]
      [--fresh | --workdir=RUN | --checkpoint=DIR | --huggingface=DIR]
      [--a=bfloat16] [--b=fp8] [--context=4096] [--sequences=8] [--json=FILE]
      [--config.FIELD=VALUE ...]

`mismatch` runs the same tokens through the sampler and through the learner and
compares their log-probs, bit for bit, and the experts they choose.

The policy is that of `--workdir`, its newest checkpoint, or of `--checkpoint`,
a folder of checkpoints or one of them; the config of their run is used, with
the overrides of the command line. Without either it is the run of the config in
its usual directory (`runs/swe-seed0`), if there is one; else, and with
`--fresh`, weights that were never trained.

`--huggingface` reads a local folder in that format, of Qwen3 or Qwen3-MoE. The
policy's shape and vocabulary are the folder's; of its fields only `window`,
`page`, `topk_pages`, `precision`, `exact`, `impl`, `remat`, `pattern` ('f', if it
is not overridden) and `max_context` (at most that of both) may be others.

The tokens are those of `--text`, a file in UTF-8, or of `--trajectories`, the
trajectory files of a run (a comma list of names and patterns); by default the
newest rollouts of the run, or else what the policy draws in random traffic.
`--positions` bounds how many drawn tokens are compared; of given tokens, every
fourth sequence comes twice, the second time from known pages, and counts again.

`--control` also scores these tokens with invariance switched off on both sides.
`--against` compares the log-probs of a foreign engine with the learner's in
place of the sampler's; `agentic_rl/diagnostics/mismatch_tokens.py` describes
the file.

The report (`--json`, '-' for standard output) has `positions`, `unequal_bits`,
`route_flips`, `max_abs_dlogp`, `verdict`, `buckets` by context length, the same
figures of the `control`, and more; `agentic_rl/diagnostics/mismatch.py` says
how each is computed. `--html` writes a page with plots that needs no other
file. The exit code is 0 if the verdict is 'exact'; where that is not to be had
(`policy.exact=False`, `--against`) if it is not 'accumulating'; else 1, and 2
on bad input.

`exactness` fills the exactness matrix of a policy: random traffic is sampled
once, and then again by engines of other sizes, steps and pages, from known
prefixes, by the learner in rows, microbatches and programs of several kinds,
and by both on other meshes (`--meshes` with no value: none; on a CPU the host
is shown as so many devices). `agentic_rl/diagnostics/policy_matrix.py` lists
the arms. The exit code is 1 if a token, a bit of a log-prob or an expert
differs.

`precision` compares two precisions of a policy over the same tokens of long
rollouts, which the first of them draws; `agentic_rl/diagnostics/precision.py`
says what is compared. The exit code is 1 if one of the two, sampler against
learner, is not exact with itself.
"""

import argparse
import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from configs import common
from launch import reports


def _mismatch(args, overrides):
  reports.check_writable(args.html)
  text = _read(args.text) if args.text else ''
  if args.against:
    open(args.against, encoding='utf-8').close()
  from agentic_rl.diagnostics import mismatch_report  # JAX loads only now
  from agentic_rl.diagnostics import mismatch_run
  from agentic_rl.diagnostics import mismatch_tokens as tokens_lib

  policy = _policy(args, overrides)
  reports.note(f'policy: {policy.origin}')
  cfg, seed = policy.cfg, policy.config.seed
  if args.against:
    examples = tokens_lib.read_foreign(args.against, cfg)
    report = mismatch_run.measure_foreign(
        policy,
        examples,
        f'foreign log-probs, {args.against}',
        note=reports.note,
    )
  else:
    if args.text:
      source = tokens_lib.from_text(
          text, policy.tokenizer(), cfg, args.positions, seed
      )
      origin = f'{args.text}, {source.origin}'
      source = dataclasses.replace(source, origin=origin)
    else:
      files = tokens_lib.trajectory_files(args.trajectories)
      if not files and policy.workdir is not None:
        files = tokens_lib.newest_trajectories(policy.workdir)
      source = (
          tokens_lib.from_trajectories(files, cfg, args.positions, seed)
          if files
          else tokens_lib.from_traffic(cfg, args.positions, seed)
      )
    reports.note(f'tokens: {source.origin}')
    report = mismatch_run.measure(
        policy, source, control=args.control, note=reports.note
    )
  if args.html:
    page = mismatch_report.page(report)
    pathlib.Path(args.html).write_text(page, encoding='utf-8')
  holds = mismatch_run.holds(report, bool(args.against))
  return report, mismatch_report.table(report), holds


def _exactness(args, overrides):
  from agentic_rl.diagnostics import policy_matrix  # JAX loads only now
  from agentic_rl.parallel import mesh
  from agentic_rl.rollout import engine

  usual = args.meshes is None
  meshes = list(policy_matrix.MESHES) if usual else args.meshes
  policy = _policy(args, overrides, meshes)
  reports.note(f'policy: {policy.origin}')
  own = policy.config.get('mesh', '')
  if mesh.make(own).mesh is None:
    own = ''
  if usual:
    usable = policy_matrix.fitting(policy.cfg, meshes)
    for text in meshes:
      if text not in usable:
        reports.note(f'mesh {text}: left out, it does not fit here')
    meshes = usable
  report = policy_matrix.measure(
      policy.cfg,
      policy.weights,
      sampling=engine.Sampling(**dict(policy.config.sampling.items())),
      positions=args.positions,
      meshes=list(dict.fromkeys([*meshes, *filter(None, [own])])),
      seed=policy.config.seed,
      note=reports.note,
  )
  return report, policy_matrix.table(report), report['exact']


def _precision(args, overrides):
  from agentic_rl import setup_run  # JAX loads only now
  from agentic_rl.diagnostics import precision

  setup_run.prepare_process()
  policy = _policy(args, overrides)
  reports.note(f'policy: {policy.origin}')
  report = precision.measure(
      policy.cfg,
      policy.weights,
      a=args.a,
      b=args.b,
      context=args.context,
      sequences=args.sequences,
      own=min(64, args.context // 4),
      temperature=policy.config.sampling.temperature,
      seed=policy.config.seed,
      note=reports.note,
  )
  return report, precision.table(report), report['holds']


def _policy(args, overrides, meshes=()):
  """Loads the policy that the flags name; all meshes find their devices."""
  from agentic_rl import setup_run
  from agentic_rl.diagnostics import huggingface_policy
  from agentic_rl.diagnostics import mismatch_run
  from agentic_rl.parallel import mesh

  config = common.override_words(common.load(args.config), overrides)
  run = args.workdir or mismatch_run.run_of(args.checkpoint)
  named = args.workdir or args.checkpoint or args.huggingface
  if not (named or args.fresh):
    usual = common.default_workdir(args.config, config.seed)
    run = args.workdir = usual if mismatch_run.has_checkpoint(usual) else ''
  if run:
    path = pathlib.Path(run) / setup_run.RESOLVED
    try:
      saved = common.load_resolved(path)
    except common.ConfigError as error:
      raise common.ConfigError(f'{run} is no work directory: {error}') from None
    common.check_kinds(saved, common.load(args.config), path)
    config = common.override_words(saved, overrides)
  mesh.host_devices(config.get('mesh', ''), *meshes)
  setup_run.prepare_process()
  if args.huggingface:
    return huggingface_policy.load(config, args.huggingface, overrides)
  return mismatch_run.load(
      config, workdir=args.workdir, checkpoint=args.checkpoint
  )


def _read(path: str) -> str:
  try:
    return pathlib.Path(path).read_text(encoding='utf-8')
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is no text in UTF-8: {error}') from None


def _positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r}: allowed is 1 or more')
  return int(text)


def _parse(argv):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(required=True)

  def command(name, run, what):
    out = commands.add_parser(
        name,
        allow_abbrev=False,
        description=f'{what} More: python launch/verify.py --help',
        epilog='--config.FIELD=VALUE overrides a field of the config.',
    )
    out.set_defaults(run=run, control=False)
    out.add_argument(
        '--config',
        default='configs/swe.py',
        metavar='FILE[:ARG]',
        help='the run of this config, where no other is named (%(default)s)',
    )
    policy = out.add_mutually_exclusive_group()
    policy.add_argument(
        '--workdir',
        default='',
        metavar='RUN',
        help='work directory of a run: its newest checkpoint and its config',
    )
    policy.add_argument(
        '--checkpoint',
        default='',
        metavar='DIR',
        help='a folder of checkpoints, as RUN/checkpoints/rl, or one of them',
    )
    policy.add_argument(
        '--huggingface',
        default='',
        metavar='DIR',
        help='a local folder in Hugging Face format, of Qwen3 or Qwen3-MoE',
    )
    policy.add_argument(
        '--fresh', action='store_true', help='weights that were never trained'
    )
    reports.add_flag(out)
    return out

  def number(flags, name, default, what):
    flags.add_argument(
        name,
        type=_positive,
        default=default,
        metavar='N',
        help=f'{what} (%(default)s)',
    )

  mismatch = command(
      'mismatch', _mismatch, 'Sampler against learner over the same tokens.'
  )
  tokens = mismatch.add_mutually_exclusive_group()
  tokens.add_argument(
      '--text', default='', metavar='FILE', help='tokens of a file in UTF-8'
  )
  tokens.add_argument(
      '--trajectories',
      default='',
      metavar='FILES',
      help='tokens of trajectory files, a comma list of names and patterns',
  )
  tokens.add_argument(
      '--against',
      default='',
      metavar='FILE',
      help="log-probs of a foreign engine, in place of the sampler's",
  )
  number(mismatch, '--positions', 50_000, 'drawn tokens to compare, about')
  mismatch.add_argument(
      '--control',
      action='store_true',
      help='also with invariance switched off on both sides',
  )
  mismatch.add_argument(
      '--html', default='', metavar='FILE', help='write a page with plots'
  )
  exactness = command(
      'exactness', _exactness, 'The exactness matrix of a policy.'
  )
  number(exactness, '--positions', 10_000, 'drawn tokens of the recording')
  exactness.add_argument(
      '--meshes',
      nargs='*',
      metavar='MESH',
      help='as in data=2,fsdp=2; with no value none (those of'
      ' agentic_rl/diagnostics/policy_matrix.py that fit)',
  )
  precision = command(
      'precision', _precision, 'Two precisions of a policy over long rollouts.'
  )
  for name, default in (('a', 'bfloat16'), ('b', 'fp8')):
    precision.add_argument(
        f'--{name}',
        default=default,
        metavar='PRECISION',
        help='float32, bfloat16 or fp8 (%(default)s)',
    )
  number(precision, '--context', 4096, 'tokens of a rollout')
  number(precision, '--sequences', 8, 'rollouts')
  args, overrides = parser.parse_known_args(argv)
  if args.control and args.against:
    parser.error('--control: not allowed with --against')
  return args, overrides


def main(argv=None) -> int:
  """Runs a check; returns 0, 1 if it does not hold, 2 on bad input."""
  args, overrides = _parse(argv)
  return reports.run(lambda: args.run(args, overrides), args.json)


if __name__ == '__main__':
  sys.exit(main())
