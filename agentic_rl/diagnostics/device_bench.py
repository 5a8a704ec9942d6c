"""One prepared run for a machine with an accelerator: is it exact, is it fast.

`measure` describes the machine, counts bits with `exactness_matrix` and times
every kernel beside the best implementation of the same work that makes no such
promise. On CPU it does the same with tiny shapes: that shows that the run
works, and its times mean nothing.

Times. A program runs the op in a loop of `ROUNDS` rounds on the device. The op's
first argument has one element that depends on the previous result, and an
optimization barrier ties everything else to it, so no round can be skipped,
hoisted or overlapped. A call starts so many of these programs, each on what the
last one returned, that it takes `call_s`, and ends with one `block_until_ready`:
the host is ahead of the device, and dispatch is not measured. After a warm-up
the median of `calls` calls counts. Both sides run like that. Of the 'backward'
cases only the gradient is timed: what the forward saves is an argument.

Counted work. FLOPs are those of the products that the result needs: 2 m n k of
a matrix product, attention 4 N H for every pair of a query and a key that it
sees, 10 N H in its backward; row operations and `log_softmax` itself count
nothing. The head counts 2 T D V, and three times that in its backward, which
computes the logits again. Bytes are those of the arguments and the results,
each once: what must move, not what does. Both sides are given the same work, so
a share of the peak is that of useful work. FP8 counts against the peak of
bfloat16.

The report, and with it the JSON, is a dict:
  machine: platform, device_kind, devices, jax, chip, bf16_tflops, memory_gb_s;
    the last three are null for an unknown chip.
  exactness: a list of `exactness_matrix.Found`.
  times: a list of `Timed`.
  seconds, skipped, failed, unequal (of exact arms: bits and routes), holds.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from concurrent import futures
from typing import Any, Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from agentic_rl.diagnostics import device_cases as cases
from agentic_rl.diagnostics import exactness_matrix as matrix
from kernels_pallas import gpu_compiler
from kernels_pallas import numerics as nx
from kernels_pallas import tpu_compiler

# No case is begun later, and nothing of the matrix after half of it; what is
# left out is a row that says so.
BUDGET_S = 420.0
ROUNDS = 8
SKIPPED = 'skipped: the time is used up'


@dataclasses.dataclass(frozen=True)
class Chip:
  """Peaks of one JAX device.

  Attributes:
    bf16_flops: dense products of bfloat16, per second.
    memory_bytes: bandwidth of its memory, per second.
  """

  bf16_flops: float
  memory_bytes: float


def _tpu(name: str, devices: int = 1) -> Chip:
  chip = tpu_compiler.CHIPS[name]
  return Chip(chip.bf16_flops / devices, chip.hbm_bytes / devices)


def _gpu(name: str) -> Chip:
  chip = gpu_compiler.CHIPS[name]
  return Chip(chip.bf16_flops, chip.hbm_bytes)


# By `jax.Device.device_kind`. GPUs: NVIDIA's data sheets, without sparsity. A
# tpu7x is two devices.
CHIPS: dict[str, tuple[str, Chip]] = {
    'TPU v5 lite': ('v5e', _tpu('v5e')),
    'TPU v5e': ('v5e', _tpu('v5e')),
    'TPU v5': ('v5p', _tpu('v5p')),
    'TPU v5p': ('v5p', _tpu('v5p')),
    'TPU v6 lite': ('v6e', _tpu('v6e')),
    'TPU v6e': ('v6e', _tpu('v6e')),
    'TPU7x': ('half a tpu7x', _tpu('tpu7x', 2)),
    'NVIDIA A100-SXM4-40GB': ('A100 40 GB', Chip(312e12, 1555e9)),
    'NVIDIA A100-PCIE-40GB': ('A100 40 GB', Chip(312e12, 1555e9)),
    'NVIDIA A100-SXM4-80GB': ('A100 80 GB SXM', _gpu('a100')),
    'NVIDIA A100 80GB PCIe': ('A100 80 GB PCIe', Chip(312e12, 1935e9)),
    'NVIDIA H100 80GB HBM3': ('H100 SXM', _gpu('h100')),
    'NVIDIA H200': ('H200', Chip(989.4e12, 4800e9)),
}


@dataclasses.dataclass(frozen=True)
class Timed:
  """A measured case.

  Attributes:
    op: key of `cases.CASES`.
    shape: in words.
    ours_ms: time of our kernel.
    peer_ms: time of the peer.
    ratio: ours_ms / peer_ms.
    peer: which that is.
    tflops: of counted work, per second.
    gb_s: counted bytes, per second.
    flops_share: of the chip's peak in bfloat16.
    memory_share: of its memory's.
    error: why a side was not measured, or ''.
  """

  op: str
  shape: str = ''
  ours_ms: float | None = None
  peer_ms: float | None = None
  ratio: float | None = None
  peer: str = ''
  tflops: float | None = None
  gb_s: float | None = None
  flops_share: float | None = None
  memory_share: float | None = None
  error: str = ''


# ---------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
  """Describes the first device; see the module."""
  device = jax.devices()[0]
  name, chip = CHIPS.get(device.device_kind, (None, None))
  return dict(
      platform=device.platform,
      device_kind=device.device_kind,
      devices=jax.device_count(),
      jax=jax.__version__,
      chip=name,
      bf16_tflops=chip and chip.bf16_flops / 1e12,
      memory_gb_s=chip and chip.memory_bytes / 1e9,
  )


# ------------------------------------------------------------------- the times


def measure_program(
    program: cases.Program, call_s: float, calls: int
) -> tuple[float, int]:
  """Returns the median seconds of one run, and its bytes; see the module.

  Raises:
    Exception: what the compiler or the device says of it.
  """
  fun, args = program.ready()

  shapes = jax.eval_shape(fun, *args)
  leaves = jax.tree.leaves((args, shapes))
  moved = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in leaves)

  def round_(_, carry):
    (first, *rest), out = jax.lax.optimization_barrier(carry)
    # XLA can not know that this is 0: it might be 0 · NaN.
    number = next(x for x in jax.tree.leaves(out) if x.size).reshape(-1)[0]
    nudge = (number.astype(jnp.float32) * 0).astype(first.dtype)
    first = first.at[(0,) * first.ndim].add(nudge)
    args = jax.lax.optimization_barrier((first, *rest))
    return args, fun(*args)

  def loop(first, rest, out):
    carry = (first, *rest), out
    args, out = jax.lax.fori_loop(0, ROUNDS, round_, carry)
    return args[0], out

  # Programs that wait for the device hold no memory of their own.
  run = nx.jit(loop, donate_argnums=(0, 2))

  def call(programs: int) -> float:
    first = args[0].copy()
    out = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    jax.block_until_ready((first, out))
    began = time.perf_counter()
    for _ in range(programs):
      first, out = run(first, args[1:], out)
    jax.block_until_ready((first, out))
    return time.perf_counter() - began

  call(1)  # compiles
  programs = max(1, min(1000, round(call_s / call(1))))
  median = statistics.median(call(programs) for _ in range(calls))
  return median / programs / ROUNDS, moved


def time_case(op: str, sizes: cases.Sizes) -> Timed:
  """Times both sides of a case; what fails is told in the row."""
  found = Timed(op)
  try:
    work = cases.CASES[op](sizes)
    found = dataclasses.replace(found, shape=work.shape)
    cost = measure_program(work.ours, sizes.call_s, sizes.calls)
  except Exception as error:  # whatever a compiler or a device may raise
    return dataclasses.replace(found, error=_say('ours', error))
  found = _rates(found, work.flops, *cost)
  errors = []
  for peer in work.peers:
    try:
      seconds, _ = measure_program(peer, sizes.call_s, sizes.calls)
    except Exception as error:
      errors.append(_say(peer.name, error))
      continue
    return dataclasses.replace(
        found,
        peer=peer.name,
        peer_ms=seconds * 1e3,
        ratio=(found.ours_ms or 0) / seconds / 1e3,
    )
  return dataclasses.replace(found, error='; '.join(errors))


def _rates(found: Timed, flops: float, seconds: float, moved: int) -> Timed:
  _, chip = CHIPS.get(jax.devices()[0].device_kind, ('', None))
  flops, bandwidth = flops / seconds, moved / seconds
  return dataclasses.replace(
      found,
      ours_ms=seconds * 1e3,
      tflops=flops / 1e12,
      gb_s=bandwidth / 1e9,
      flops_share=flops / chip.bf16_flops if chip else None,
      memory_share=bandwidth / chip.memory_bytes if chip else None,
  )


def _say(who: str, error: Exception) -> str:
  text = ' '.join(str(error).split())
  return f'{who}: {type(error).__name__}: {text[:300]}'


# -------------------------------------------------------------------- the run


def measure(
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
  """Runs everything; see the module for what is returned.

  Args:
    note: told every result as it is found.
  """
  began = time.perf_counter()
  spent = lambda: time.perf_counter() - began
  say = lambda text: note(f'{spent():4.0f} s  {text}')
  report: dict[str, Any] = dict(machine=machine())
  say(' '.join(f'{k}={v}' for k, v in report['machine'].items()))
  on_cpu = nx.platform() == 'cpu'

  def check(job: matrix.Job) -> list[matrix.Found]:
    if spent() > BUDGET_S / 2:
      found = [job.found('all', error=SKIPPED)]
    else:
      try:
        found = job.measure()
      except Exception as error:  # whatever a compiler or a device may raise
        found = [job.found('all', error=_say(job.op, error))]
    say('\n        '.join(map(_exactness_line, found)))
    return found

  # Most of it is compilation, which several threads can do.
  jobs = matrix.jobs(matrix.SMALL if on_cpu else matrix.LARGE)
  with futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    exactness = [f for found in pool.map(check, jobs) for f in found]
  times = []
  for op in cases.CASES:
    timed = Timed(op, error=SKIPPED)
    if spent() <= BUDGET_S:
      timed = time_case(op, cases.SMALL if on_cpu else cases.LARGE)
    times.append(timed)
    say(_time_line(timed))
  errors = [
      e for e in [r.error for r in exactness] + [t.error for t in times] if e
  ]
  failed = sum(error != SKIPPED for error in errors)
  differ = [(f.unequal or 0) + f.flips for f in exactness if f.exact]
  report.update(
      exactness=[dataclasses.asdict(f) for f in exactness],
      times=[dataclasses.asdict(t) for t in times],
      seconds=spent(),
      skipped=len(errors) - failed,
      failed=failed,
      unequal=sum(differ),
      holds=not failed and not sum(differ),
  )
  return report


def _exactness_line(f: matrix.Found) -> str:
  name = f'{f.op:16s} {f.impl:6s} {f.dtype:8s} {f.check:8s}'
  if f.error:
    return f'{name} {f.error}'
  text = f'{name} {f.compared:9d} {f.unequal:8d}'
  if f.op == 'policy':
    text += f'  {f.flips} routes differ'
  return text + '  control arm, not exact' * (not f.exact)


def _time_line(t: Timed) -> str:
  number = lambda x, form: '-' if x is None else format(x, form)
  share = lambda x: '-' if x is None else f'{x:.0%}'
  text = (
      f'{t.op:31s} {number(t.ours_ms, ".3f"):>9s}'
      f' {number(t.peer_ms, ".3f"):>9s} {number(t.ratio, ".2f"):>6s}'
      f' {number(t.tflops, ".3g"):>7s} {share(t.flops_share):>5s}'
      f' {number(t.gb_s, ".3g"):>7s} {share(t.memory_share):>5s}'
      f'  {t.shape}'
  )
  return text + f'; {t.peer}' * bool(t.peer) + f'; {t.error}' * bool(t.error)


def table(report: Mapping[str, Any]) -> str:
  """Returns what `measure` found as text."""
  lines = [f'{k:14s} {v}' for k, v in report['machine'].items()]
  lines += [
      '',
      'the same inputs in different company: compared, unequal in a bit',
      f'{"op":16s} {"impl":6s} {"dtype":8s} {"check":8s} {"compared":>9s}'
      f' {"unequal":>8s}',
  ]
  lines += [_exactness_line(matrix.Found(**f)) for f in report['exactness']]
  lines += [
      '',
      'bfloat16; shares are of the chip in bfloat16 and of its memory',
      f'{"op":31s} {"ours_ms":>9s} {"peer_ms":>9s} {"ratio":>6s}'
      f' {"TFLOP/s":>7s} {"share":>5s} {"GB/s":>7s} {"share":>5s}'
      '  shape; peer',
  ]
  lines += [_time_line(Timed(**t)) for t in report['times']]
  if report['machine']['platform'] == 'cpu':
    lines.append('tiny shapes on CPU: the times show the format only')
  lines += [
      '',
      f'{report["unequal"]} unequal in exact arms, {report["failed"]} failed,'
      f' {report["skipped"]} skipped, {report["seconds"]:.0f} s',
  ]
  return '\n'.join(lines)
