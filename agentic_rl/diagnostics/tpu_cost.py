"""What a program costs on a TPU, read from the compiler's own listing.

A TPU core is a VLIW machine: each cycle it issues one *bundle*, which holds an
instruction for each of its units (matrix, vector, memory, scalar); a bundle is
empty while results are on their way. libtpu writes the final bundles of every
op to a file, so the cycles that an op issues can be counted without a TPU:

  executed bundles = Σ over bundles of how often the bundle is issued

`tpu_listing` counts them: loops by their trips, skipped regions not. The trips
of loops that depend on data are not in the listing; the builder states them.

Not modelled: waiting for DMA and contention for HBM, so a kernel that memory
bounds takes longer than its count; taken branches that stall; time between ops.
An op inside an HLO loop counts once. Compare only on the same chip, the same
work and the same libtpu; below 10-15 % is a tie.

  python -m agentic_rl.diagnostics.tpu_cost MODULE:FUNCTION [--chip=v5e]
      [--kwargs='{"rows": 256}']

prints loops and regions of every op. Compilation runs in a child process,
because libtpu reads its flags once (`--child=DIR`, for `measure`).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any, Mapping, Sequence

from agentic_rl.diagnostics import tpu_listing
from kernels_pallas import tpu_compiler

_MODULE = 'agentic_rl.diagnostics.tpu_cost'
_ROOT = pathlib.Path(__file__).resolve().parents[2]

_FLAGS = (
    '--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true'
    ' --xla_jf_dump_llo_pass_label_regex='
    '(final|packed-bundles-post-ra|utiliz).*'
    # Operands stay in HBM; else XLA puts some of small programs into VMEM.
    ' --xla_msa_enable=false'
)
# After register allocation, so that waiting for results still shows.
_LISTING = 'packed-bundles-post-ra'
_UTILIZATION = 'pre-delay_hlo-static-per-bundle-utilization'
_ALLOCATIONS = 'pre-finalize-registers-and-allocations'
_ALLOCATION = re.compile(r'space=vmem, size = (0x[0-9a-f]+|\d+)')
_EXCEPTION = re.compile(r'^[\w.]*(?:Error|Exception)\b', re.MULTILINE)
_KERNEL = re.compile(
    r'%(\S+) = [^\n]*custom-call[^\n]*custom_call_target="tpu_custom_call"'
)
GRANULE = 32  # bytes of a unit in which copies are measured


@dataclasses.dataclass(frozen=True)
class OpCost:
  """The cost of one op of a program.

  Attributes:
    name: of the HLO op; of a Pallas kernel its name and a number.
    kernel: whether it is a Pallas kernel.
    bundles: executed; None if the trips of a loop are not known.
    mxu: executed instructions of the matrix unit; None with `bundles`.
    listed: bundles in the listing.
    spills: stores of vector registers in the listing.
    fills: loads of spilled registers in the listing.
    vmem_bytes: scratch and blocks of the pipeline.
    hbm_bytes: copied from HBM and to it, at most: a copy that depends on data
      counts as made; None where a size does.
    parts: loops and regions in the order of the listing.
  """

  name: str
  kernel: bool
  bundles: float | None
  mxu: float | None
  listed: int
  spills: int
  fills: int
  vmem_bytes: int
  hbm_bytes: float | None
  parts: tuple[tpu_listing.Part, ...]

  @property
  def loops(self) -> list[tuple[int, float | None]]:
    """(bundles, trips) of each loop; trips are means, None if not known."""
    return [
        (p.size, p.runs / p.entered if p.runs and p.entered else p.runs)
        for p in self.parts
        if p.kind == 'loop'
    ]


def measure(
    fun_path: str,
    kwargs: Mapping[str, Any],
    chip: str,
    timeout_s: float = 600,
) -> list[OpCost]:
  """Compiles a program for a TPU in a child process and counts its bundles.

  Args:
    fun_path: 'package.module:function', a builder. It returns (fun, args) with
      `jax.ShapeDtypeStruct` args, or (fun, args, runs); `runs` maps the start
      of a kernel's name to keyword arguments of `tpu_listing.count`: what is
      not in the listing because it depends on data.
    kwargs: of the builder, plain JSON values.
    chip: key of `tpu_compiler.CHIPS`.
    timeout_s: for one compilation.

  Returns:
    The ops of the program by name.

  Raises:
    ValueError: on an unknown chip, or if `runs` do not fit; the message lists
      what the kernel has.
    RuntimeError: if the builder or the compiler fails.
  """
  if chip not in tpu_compiler.CHIPS:
    raise ValueError(f'chip={chip!r}: allowed are {sorted(tpu_compiler.CHIPS)}')
  with tempfile.TemporaryDirectory() as folder:
    code, error = _run_child(fun_path, kwargs, chip, folder, timeout_s)
    if code == 0:
      return read_folder(pathlib.Path(folder))
  # The exception that ended the child, without the frames above it.
  ends = [m.start() for m in _EXCEPTION.finditer(error)]
  error = error[ends[-1] :][:800] if ends else error[-800:]
  raise RuntimeError(f'{fun_path} {dict(kwargs)} on {chip}: {error.strip()}')


def _run_child(fun_path, kwargs, chip, folder, timeout_s) -> tuple[int, str]:
  """Returns the child's exit code and what it wrote to standard error."""
  paths = [str(_ROOT), os.environ.get('PYTHONPATH', '')]
  env = os.environ | {
      'LIBTPU_INIT_ARGS': _FLAGS.format(folder),
      'JAX_PLATFORMS': 'cpu',
      'JAX_ENABLE_COMPILATION_CACHE': 'false',  # a hit would write no listing
      'PYTHONPATH': os.pathsep.join(p for p in paths if p),
  }
  command = [sys.executable, '-W', 'ignore', '-m', _MODULE, fun_path]
  command += [f'--kwargs={json.dumps(dict(kwargs))}', f'--chip={chip}']
  command += [f'--child={folder}']
  try:
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        errors='replace',
        timeout=timeout_s,
    )
  except subprocess.TimeoutExpired:
    return 1, f'no result after {timeout_s} s'
  return done.returncode, done.stderr


def _compile(fun_path: str, kwargs, chip: str, folder: pathlib.Path) -> None:
  """Compiles in this process; libtpu writes the listing."""
  module, name = fun_path.split(':')
  fun, args, *runs = getattr(importlib.import_module(module), name)(**kwargs)
  compiled = tpu_compiler.compile_for(fun, args, chip)
  facts = {
      'kernels': _KERNEL.findall(compiled.as_text()),
      'runs': runs[0] if runs else {},
  }
  (folder / 'facts.json').write_text(json.dumps(facts), encoding='utf-8')


def read_folder(folder: pathlib.Path) -> list[OpCost]:
  """Returns the ops whose dumps a child wrote into a folder.

  Raises:
    ValueError: if `runs` do not fit.
    RuntimeError: if there is no dump.
  """
  facts = json.loads((folder / 'facts.json').read_text(encoding='utf-8'))
  ops = []
  for path in sorted(folder.glob(f'*-{_LISTING}.txt')):
    match = re.fullmatch(rf'\d+-(.+)-\d+-{_LISTING}\.txt', path.name)
    # Names in <> and TLP are code around the ops.
    if not match or match[1].startswith(('<', 'TLP')):
      continue
    stem = path.name[: match.end(1)]
    dumps = [path, *(next(folder.glob(f'{stem}-*-{key}.txt')) for key in
                     (_UTILIZATION, _ALLOCATIONS))]  # fmt: skip
    runs = [r for s, r in facts['runs'].items() if s in match[1]]
    ops.append(
        read_op(
            match[1],
            *(p.read_text(errors='replace') for p in dumps),
            kernel=match[1] in facts['kernels'],
            runs=runs[0] if runs else {},
        )
    )
  if not ops:
    raise RuntimeError('libtpu wrote no listing: its flags may have changed')
  return sorted(ops, key=lambda op: op.name)


def read_op(
    name: str,
    listing: str,
    utilization: str,
    allocations: str,
    *,
    kernel: bool = True,
    runs: Mapping[str, Any] | None = None,
) -> OpCost:
  """Reads the dumps of one op.

  Args:
    name: of the op.
    listing: its bundles.
    utilization: how many instructions of each unit they hold, a row each.
    allocations: its memory.
    kernel: whether it is a Pallas kernel.
    runs: keyword arguments of `tpu_listing.count`.

  Raises:
    ValueError: if `runs` do not fit, or the dumps are not in the known form.
  """
  try:
    count = tpu_listing.count(listing, **(runs or {}))
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from error
  units = _units(utilization, len(count.times))
  known = None not in count.times
  return OpCost(
      name=name,
      kernel=kernel,
      bundles=sum(t or 0 for t in count.times) if known else None,
      mxu=(
          sum((t or 0) * n for t, n in zip(count.times, units['MXU']))
          if known
          else None
      ),
      listed=len(count.times),
      spills=sum(units['VSTORE:SPILL']),
      fills=sum(units['VLOAD:FILL']),
      vmem_bytes=sum(int(x, 0) for x in _ALLOCATION.findall(allocations)),
      hbm_bytes=None if count.copied is None else GRANULE * count.copied,
      parts=tuple(count.parts),
  )


def _units(utilization: str, count: int) -> dict[str, list[int]]:
  """Returns, by unit, how many of its instructions each bundle holds."""
  lines = utilization.splitlines()
  names = next(l for l in lines if l.startswith('MXU')).split(',')
  begin = next(i for i, l in enumerate(lines) if l.startswith('== UTIL')) + 1
  rows = [[int(x) for x in line.split()] for line in lines[begin:] if line]
  if len(rows) != count:
    raise ValueError(f'{len(rows)} rows of utilization for {count} bundles')
  return {n.strip(): [r[i] for r in rows] for i, n in enumerate(names)}


def describe(op: OpCost) -> str:
  """Returns a line about an op and one for each of its larger parts."""
  lines = [
      f'{op.name}: {op.bundles} bundles ({op.listed} listed), MXU {op.mxu},'
      f' spills {op.spills}, fills {op.fills}, VMEM {op.vmem_bytes},'
      f' HBM {op.hbm_bytes}'
  ]
  for part in op.parts:
    if part.size >= tpu_listing.LEAST or part.data:
      lines.append(
          f'  {part.kind} at {part.start}: {part.size} bundles, runs'
          f' {part.runs}' + ', depends on data' * part.data
      )
  return '\n'.join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the cost of one program; with --child only compiles it."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('builder', metavar='MODULE:FUNCTION')
  parser.add_argument('--kwargs', type=json.loads, default={})
  parser.add_argument('--chip', default='v5e')
  parser.add_argument('--child', default='', metavar='DIR')
  args = parser.parse_args(argv)
  if args.child:
    folder = pathlib.Path(args.child)
    _compile(args.builder, args.kwargs, args.chip, folder)
  else:
    for op in measure(args.builder, args.kwargs, args.chip):
      print(describe(op))
  return 0


if __name__ == '__main__':
  sys.exit(main())
