"""Our TPU kernels against JAX's own on the same work, by executed bundles.

`CASES` is the table: an op, our program, JAX's programs for the same work, and
the ratio that is aimed at. Of several peers (block sizes, fused or not) the
cheapest one counts. Both sides are measured by `tpu_cost` in executed bundles
of their Pallas kernels; what XLA does around them (moving heads, a sort of the
experts) is left out on both sides unless it is named in `Side.also`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Callable, Mapping, Sequence

from agentic_rl.diagnostics import kernel_programs as programs
from agentic_rl.diagnostics import tpu_cost
from kernels_pallas import tpu_compiler

CHIPS = ('v5e', 'v6e')

_NOTHING = '$.'  # matches no name


@dataclasses.dataclass(frozen=True)
class Side:
  """A program that does the work of a case.

  Attributes:
    name: for the table.
    builder: name of a function of `kernel_programs`.
    kwargs: of the builder.
    also: regular expression of XLA's ops that belong to the work.
  """

  name: str
  builder: str
  kwargs: Mapping[str, Any]
  also: str = _NOTHING


@dataclasses.dataclass(frozen=True)
class Case:
  """Work that we and JAX can both do.

  Attributes:
    op: name of the work.
    ours: our side.
    peers: JAX's sides.
    goal: largest ratio of ours to the best peer that is aimed at; 1.2, the
      price of exactness, where nothing better is known.
    flops: of the products that the result needs, visible keys only.
  """

  op: str
  ours: Side
  peers: tuple[Side, ...]
  goal: float
  flops: float


@dataclasses.dataclass(frozen=True)
class Result:
  """A measured case.

  Attributes:
    op: name of the work.
    chip: key of `tpu_compiler.CHIPS`.
    ours: executed bundles of our kernels.
    peer: executed bundles of the best peer.
    peer_name: which that is.
    ratio: ours / peer.
    goal: largest ratio that is aimed at.
    spills: vector stores in the listings of our kernels.
    vmem_bytes: of our largest kernel.
    hbm_bytes: that our kernels copy, see `tpu_cost.OpCost`.
    peer_hbm_bytes: the same of the peer.
    cycles_ratio: ratio of ours to the best peer in cycles where HBM bounds, too:
      a side takes the larger of its bundles and of what the chip's peak
      bandwidth needs for its bytes. None where bytes are not known.
    mxu_share: share of our bundles in which full matrix units would do the
      useful work, flops / (bf16_flops / clock_hz) / ours.
    around: bundles of XLA's ops around our kernels and the peer's, which are
      in no other figure; loops that depend on data count once.
  """

  op: str
  chip: str
  ours: int
  peer: int
  peer_name: str
  ratio: float
  goal: float
  spills: int
  vmem_bytes: int
  hbm_bytes: float | None
  peer_hbm_bytes: float | None
  cycles_ratio: float | None
  mxu_share: float
  around: tuple[int, int]

  def row(self) -> dict[str, Any]:
    """Returns all but `around`."""
    row = dataclasses.asdict(self)
    del row['around']
    return row


def measure(
    chip: str,
    cases: Sequence[Case] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[list[Result], dict[str, str]]:
  """Measures cases one after another.

  Args:
    chip: of `CHIPS`.
    cases: what to measure, None for `CASES`.
    note: told what is being done.

  Returns:
    The results, and {op: why} of cases that were not measured: a program that
    does not compile, or a kernel whose parts are not those that are stated.

  Raises:
    ValueError: on an unknown chip.
  """
  if chip not in CHIPS:
    raise ValueError(f'chip={chip!r}: allowed are {list(CHIPS)}')
  cases = CASES if cases is None else cases
  results, failures = [], {}
  for i, case in enumerate(cases):
    note(f'{i + 1} of {len(cases)}: {case.op}')
    try:
      results.append(_measure_case(case, chip))
    except (RuntimeError, ValueError) as error:
      failures[case.op] = str(error)
  return results, failures


def _measure_case(case: Case, chip: str) -> Result:
  facts = tpu_compiler.CHIPS[chip]
  flops_per_cycle = facts.bf16_flops / facts.clock_hz
  bytes_per_cycle = facts.hbm_bytes / facts.clock_hz
  ours = _measure_side(case.ours, chip)
  peers = [(_measure_side(s, chip), s.name) for s in case.peers]
  peer, name = min(peers, key=lambda pair: pair[0].bundles)
  return Result(
      op=case.op,
      chip=chip,
      ours=ours.bundles,
      peer=peer.bundles,
      peer_name=name,
      ratio=ours.bundles / peer.bundles,
      goal=case.goal,
      spills=ours.spills,
      vmem_bytes=ours.vmem_bytes,
      hbm_bytes=ours.hbm_bytes,
      peer_hbm_bytes=peer.hbm_bytes,
      cycles_ratio=cycles_ratio(ours, peer, bytes_per_cycle),
      mxu_share=case.flops / flops_per_cycle / ours.bundles,
      around=(ours.around, peer.around),
  )


@dataclasses.dataclass(frozen=True)
class Measured:
  """A side: bundles and memory of what counts, bundles of the rest."""

  bundles: int
  spills: int
  vmem_bytes: int
  hbm_bytes: float | None
  around: int


def cycles_ratio(
    ours: Measured, peer: Measured, bytes_per_cycle: float
) -> float | None:
  """Returns `Result.cycles_ratio`."""
  if ours.hbm_bytes is None or peer.hbm_bytes is None:
    return None
  mine = max(ours.bundles, ours.hbm_bytes / bytes_per_cycle)
  return mine / max(peer.bundles, peer.hbm_bytes / bytes_per_cycle)


def _measure_side(side: Side, chip: str) -> Measured:
  ops = tpu_cost.measure(
      f'{programs.__name__}:{side.builder}', side.kwargs, chip
  )
  counts = lambda op: op.kernel or re.search(side.also, op.name)
  counted = [op for op in ops if counts(op)]
  rest = [op for op in ops if not counts(op)]
  unknown = [op for op in counted if op.bundles is None]
  if unknown or not counted:
    found = '\n'.join(map(tpu_cost.describe, unknown or ops))
    raise ValueError(
        f'{side.name} on {chip}: no kernel, or loops without stated'
        f' trips\n{found}'
    )
  copied: list[Any] = [op.hbm_bytes for op in counted]
  return Measured(
      round(sum(op.bundles or 0 for op in counted)),
      sum(op.spills for op in counted),
      max(op.vmem_bytes for op in counted),
      None if None in copied else round(sum(copied)),
      round(sum(op.bundles or op.listed for op in rest)),
  )


def table(results: Sequence[Result], failures: Mapping[str, str]) -> str:
  """Returns what `measure` found as text."""
  lines = [
      'executed bundles: issue cycles, without DMA waits and contention for'
      ' HBM; below 10-15 % is a tie. Cycles: the same ratio if a side takes at'
      ' least what HBM at its peak needs for its bytes.',
      'VMEM: MiB of our largest kernel. HBM: MB that are copied, at most, ours'
      " and the peer's. XLA: bundles of the ops around the kernels, ours and the"
      " peer's; they are in no other column.",
      f'{"op":34s} {"chip":4s} {"ours":>8s} {"peer":>8s} {"ratio":>5s}'
      f' {"goal":>5s} {"cycles":>6s} {"MXU":>4s} {"spills":>6s} {"VMEM":>5s}'
      f' {"HBM":>11s} {"XLA":>15s}  peer',
  ]
  for r in results:
    around = f'{r.around[0]}/{r.around[1]}'
    hbm = '/'.join(
        '?' if n is None else f'{n / 1e6:.0f}'
        for n in (r.hbm_bytes, r.peer_hbm_bytes)
    )
    cycles = '?' if r.cycles_ratio is None else f'{r.cycles_ratio:.2f}'
    lines.append(
        f'{r.op:34s} {r.chip:4s} {r.ours:8d} {r.peer:8d} {r.ratio:5.2f}'
        f' {r.goal:5.2f} {cycles:>6s} {r.mxu_share:4.0%} {r.spills:6d}'
        f' {r.vmem_bytes / 2**20:5.1f} {hbm:>11s} {around:>15s}'
        f'  {r.peer_name}' + ', goal missed' * (r.ratio > r.goal)
    )
  lines += [f'{op}: not measured: {why}' for op, why in failures.items()]
  return '\n'.join(lines)


def _splash(
    window: int | None,
    phase: str,
    block: int = 512,
    tokens: int = programs.TOKENS,
) -> Side:
  """Blocks: the best of some ten choices on both chips, or within 4 %."""
  return Side(
      f'splash {phase} {block}',
      'splash',
      dict(
          window=window, phase=phase, queries=block, keys=block, tokens=tokens
      ),
      # The fused kernel leaves a sum of parts of dq to XLA.
      also='^reduce' if phase == 'fused' else _NOTHING,
  )


def _attention(window: int | None, backward: bool) -> Side:
  return Side('ours', 'our_attention', dict(window=window, backward=backward))


def _megablox(phase: str) -> tuple[Side, ...]:
  return tuple(
      Side(
          f'megablox {rows}x1024x1024',
          'megablox',
          dict(phase=phase, tiling=(rows, 1024, 1024)),
      )
      for rows in (128, 256)
  )


# Flops of a query and a key, in all heads.
_PAIR = 4.0 * programs.HEADS * programs.WIDTH
_ROW = 2.0 * programs.TOKENS * programs.D_MODEL
_EXPERTS = _ROW * programs.D_EXPERT
_LOGITS = _ROW * programs.VOCAB

CASES = (
    Case(
        'attention window 512 forward',
        _attention(512, False),
        (_splash(512, 'forward'),),
        0.60,
        _PAIR * programs.visible(512),
    ),
    Case(
        'attention window 128 forward',
        _attention(128, False),
        (_splash(128, 'forward'),),
        0.60,
        _PAIR * programs.visible(128),
    ),
    Case(
        'attention causal forward',
        _attention(None, False),
        (_splash(None, 'forward', 1024),),
        1.00,
        _PAIR * programs.visible(None),
    ),
    Case(
        'attention block-sparse 32k forward',
        Side('ours', 'our_attention', dict(sparse=True)),
        (_splash(None, 'forward', 1024, programs.LONG),),
        0.50,
        _PAIR * programs.selected_pairs(),
    ),
    Case(
        'attention window 512 backward',
        _attention(512, True),
        (_splash(512, 'fused'), _splash(512, 'split')),
        0.75,
        2.5 * _PAIR * programs.visible(512),
    ),
    Case(
        'attention window 128 backward',
        _attention(128, True),
        (_splash(128, 'fused'), _splash(128, 'split')),
        0.75,
        2.5 * _PAIR * programs.visible(128),
    ),
    Case(
        'attention causal backward',
        _attention(None, True),
        (_splash(None, 'fused'), _splash(None, 'fused', 1024)),
        1.20,
        2.5 * _PAIR * programs.visible(None),
    ),
    Case(
        'attention decode',
        Side('ours', 'our_decode', {}),
        tuple(
            Side(
                f'ragged paged attention, {q} queries a block',
                'ragged_paged',
                dict(page=128, pages_per_block=16, queries_per_block=q),
            )
            for q in (2, 8)
        ),
        1.00,
        _PAIR * programs.SEQUENCES * programs.CONTEXT,
    ),
    Case(
        'grouped_matmul forward',
        Side('ours', 'our_grouped', dict(phase='forward')),
        _megablox('forward'),
        1.10,
        _EXPERTS,
    ),
    Case(
        'grouped_matmul backward rows',
        Side('ours', 'our_grouped', dict(phase='rows')),
        _megablox('rows'),
        1.10,
        _EXPERTS,
    ),
    Case(
        'grouped_matmul backward weights',
        Side('ours', 'our_grouped', dict(phase='weights')),
        _megablox('weights'),
        1.10,
        _EXPERTS,
    ),
    Case(
        'logprobs forward',
        Side('ours', 'our_logprobs', dict(backward=False)),
        (Side('XLA log_softmax', 'xla_logprobs', dict(), also='.'),),
        1.20,
        _LOGITS,
    ),
    Case(
        'logprobs backward',
        Side('ours', 'our_logprobs', dict(backward=True)),
        (
            Side(
                'XLA log_softmax, remat',
                'xla_logprobs',
                dict(backward=True),
                also='.',
            ),
        ),
        1.20,
        3 * _LOGITS,
    ),
)


def select(only: str) -> tuple[Case, ...]:
  """Returns cases by their names.

  Args:
    only: parts of names, separated by commas; '' for all of `CASES`.

  Raises:
    ValueError: if a part is in no name.
  """
  parts = [part.strip() for part in only.split(',')]
  for part in parts:
    if not any(part in case.op for case in CASES):
      names = [case.op for case in CASES]
      raise ValueError(f'only={part!r}: allowed are parts of {names}')
  return tuple(c for c in CASES if any(part in c.op for part in parts))
