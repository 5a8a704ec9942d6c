"""Bundles of a TPU program: counted by hand, and of the real compiler."""

import dataclasses
import json
import pathlib

import pytest

from agentic_rl.diagnostics import kernel_bench
from agentic_rl.diagnostics import kernel_programs
from agentic_rl.diagnostics import tpu_cost
from agentic_rl.diagnostics import tpu_listing
from launch import bench

# The listing of `programs.sums` for v5e, only its scalar instructions kept.
SUMS = (pathlib.Path(__file__).parent / 'sums_v5e.txt').read_text()

# Loop 3..14, in it the region 9..9. Units of a bundle read before they write.
TINY = """
= control target key end
   0   :  { %s1_s0 = smov 2 /* from 2 ;; to 8 by 3 */ }
 0x1   :  { %s9_s4 = sld [smem:[#allocation3]] }
 0x2   :  {}
 0x3 LB: > { %p8_p2 = scmp.eq.s32.totalorder %s2_s0, 5  ;; \
 %s2_s0 = sphi %s1_s0, %s3_s0  ;;  %v1_v0 = vmov 0.0 }
 0x4   : > { %3 = sbr.rel (%p8_p2) target bundleno = 10 (0xa), region = 4 ;; \
 %s3_s0 = sadd.s32 3, %s2_s0 }
 0x5   : > { %p4_p1 = scmp.ge.s32.totalorder %s3_s0, 8 }
 0x6   :  {}
 0x7   :  {}
 0x8   :  {}
 0x9   : > { %v2_v0 = vadd.f32 %v1_v0, %v1_v0 } /* End region 4 */
 0xa PF: > { %9 = sbr.rel (!%p4_p1) target bundleno = 3 (0x3), region = 5 }
 0xb   :  {}
 0xc   :  {}
 0xd   :  {}
 0xe   :  {}
 0xf   :  {}
"""


def parts(count):
  return [(p.kind, p.start, p.size, p.runs) for p in count.parts]


def test_constant_bounds_and_a_step():
  # The counter is 2 and 5; the region is skipped at 5.
  count = tpu_listing.count(TINY)
  assert parts(count) == [('loop', 3, 12, 2), ('region', 9, 1, 1)]
  assert count.times == [1, 1, 1] + 6 * [2] + [1] + 5 * [2] + [1]


def test_a_region_on_data():
  # At 4 the branch depends on what bundle 1 has read from memory.
  text = TINY.replace('totalorder %s2_s0, 5', 'totalorder %s9_s4, 5')
  assert tpu_listing.count(text).times[9] == 2  # counted as run


def test_copies_of_hbm():
  """Bundle 6 copies 8 granules unless the counter is 5, bundle 15 once 16."""
  one = '%4 = dma.hbm_to_vmem [thread:$0] {}/*hbm=*/%s1_s2, /*n=*/{}, %s3_s0'
  text = TINY.replace('0xf   :  {}', '0xf   :  { ' + one.format('', 16) + ' }')
  assert tpu_listing.count(text).copied == 16
  in_loop = one.format('(!%p8_p2), ', 8)
  text = text.replace('0x6   :  {}', '0x6   :  { ' + in_loop + ' }')
  assert tpu_listing.count(text).copied == 8 + 16  # of two rounds in one
  assert tpu_listing.count(text.replace('(!%p8', '(%p8')).copied == 8 + 16
  always = text.replace('(!%p8_p2), ', '')
  assert tpu_listing.count(always).copied == 2 * 8 + 16
  on_data = text.replace('(!%p8_p2)', '(%p77_p7)')
  assert tpu_listing.count(on_data).copied == 2 * 8 + 16  # as made each time
  checked = text.replace('%4 = dma', '%9 = shalt.err (%p1_p9) for %4 = dma')
  assert tpu_listing.count(checked).copied == 0
  by_counter = text.replace('/*n=*/8', '/*n=*/%s3_s0').replace(
      '(!%p8_p2), ', ''
  )
  assert tpu_listing.count(by_counter).copied == 5 + 8 + 16
  unknown = text.replace('/*n=*/16', '/*n=*/%s9_s4')
  assert tpu_listing.count(unknown).copied is None


def test_sums_by_hand():
  # 345 bundles; the loop over the grid, 12..340, makes 2x3 steps and two trips
  # to fill and empty the pipeline, in which 32..324 is skipped. The first and
  # the last of three steps run 40..112 and 235..307, twice each. 146..160 is
  # the sum: its trips depend on data.
  count = tpu_listing.count(SUMS, loops=[30])
  assert parts(count) == [
      ('loop', 12, 329, 8),
      ('region', 32, 293, 6),
      ('region', 40, 73, 2),
      ('region', 145, 16, 6),
      ('loop', 146, 15, 30),
      ('region', 235, 73, 2),
  ]
  own = 293 - 73 - 15 - 73
  by_hand = (345 - 329) + 8 * (329 - 293) + 6 * own + 2 * 2 * 73 + 30 * 15
  assert sum(count.times) == by_hand == 1838


def test_unstated_trips_are_unknown():
  times = tpu_listing.count(SUMS).times
  assert [i for i, t in enumerate(times) if t is None] == list(range(146, 161))


@pytest.mark.parametrize(
    ('stated', 'match'),
    [
        (
            dict(loops=[1, 2]),
            r'loops=\[1, 2\]: 1 loops depend on data.*146, 15',
        ),
        (dict(loops=[1], regions=[1]), r'regions=\[1\]: 0 regions'),
        (dict(scalars=[5]), r'scalars=\[5\]: the op has 0 scalar'),
    ],
)
def test_what_is_stated_must_fit(stated, match):
  with pytest.raises(ValueError, match=match):
    tpu_listing.count(SUMS, **stated)


@pytest.mark.parametrize(
    ('text', 'match'),
    [
        ('', 'no bundle found'),
        ('   0   :  {}\n 0x2   :  {}\n', 'bundle 0x2 where 1 was expected'),
    ],
)
def test_other_forms_are_refused(text, match):
  with pytest.raises(ValueError, match=match):
    tpu_listing.count(text)


def test_read_op():
  rows = ['0 0 0'] * 345
  rows[147] = '2 1 3'  # in the sum, 30 times
  rows[0] = '1 0 0'
  utilization = '\n'.join(
      ['MXU, VLOAD:FILL, VSTORE:SPILL', '4 3 1', '== UTILIZATION:', *rows]
  )
  allocations = """
    #allocation1 [shape = 'u32[72,128]', space=vmem, size = 0x9000, scoped]
    #allocation2 [shape = 's32[1]{0}', space=sflag, size = 0x4, scoped]
    #allocation5 [shape = 'u8[2048]{0}', space=vmem, size = 2048, scoped]
  """
  op = tpu_cost.read_op(
      'sums.1', SUMS, utilization, allocations, runs=dict(loops=[30])
  )
  assert (op.bundles, op.mxu, op.listed) == (1838, 61, 345)
  assert (op.spills, op.fills, op.vmem_bytes) == (3, 1, 0x9000 + 2048)
  assert op.loops == [(329, 8), (15, 5)]  # 30 trips in 6 steps
  assert tpu_cost.read_op('s', SUMS, utilization, '').bundles is None
  with pytest.raises(ValueError, match='344 rows of utilization for 345'):
    tpu_cost.read_op('s', SUMS, utilization[:-6], '')


def test_bad_chip(capsys):
  with pytest.raises(ValueError, match=r"chip='v9': allowed are \['tpu7x', "):
    tpu_cost.measure('tests.diagnostics.programs:matmul', {}, 'v9')
  with pytest.raises(ValueError, match=r"chip='v5p': allowed are \['v5e', 'v6"):
    kernel_bench.measure('v5p')
  assert bench.main(['kernels', '--chip=v5e', '--only=decode,splash']) == 2
  assert "only='splash': allowed are parts of" in capsys.readouterr().err
  assert bench.main(['kernels', '--chip=v4']) == 2
  argv = ['kernels', '--chip=v5e', '--json=/no/such/folder/x.json']
  assert bench.main(argv) == 2
  assert "chip='v4': allowed are ['v5e', 'v6e']" in capsys.readouterr().err


RESULT = kernel_bench.Result(
    op='work',
    chip='v5e',
    ours=130,
    peer=100,
    peer_name='other',
    ratio=1.3,
    goal=1.2,
    spills=3,
    vmem_bytes=1 << 20,
    hbm_bytes=3e6,
    peer_hbm_bytes=None,
    cycles_ratio=None,
    mxu_share=0.5,
    around=(7, 8),
)


def test_command(monkeypatch, tmp_path, capsys):
  found = [RESULT], {}
  asked = []

  def measure(chip, cases, note):
    del note
    asked.append((chip, [c.op for c in cases]))
    return found

  monkeypatch.setattr(kernel_bench, 'measure', measure)
  file = tmp_path / 'out.json'
  assert bench.main(['kernels', '--chip=v5e', f'--json={file}']) == 0
  assert json.loads(file.read_text()) == [
      {
          'op': 'work',
          'chip': 'v5e',
          'ours': 130,
          'peer': 100,
          'peer_name': 'other',
          'ratio': 1.3,
          'goal': 1.2,
          'spills': 3,
          'vmem_bytes': 1 << 20,
          'hbm_bytes': 3e6,
          'peer_hbm_bytes': None,
          'cycles_ratio': None,
          'mxu_share': 0.5,
      }
  ]
  out = capsys.readouterr().out
  assert 'goal missed' in out and '7/8' in out and '3/?' in out
  better = dataclasses.replace(RESULT, ratio=1.2)
  assert 'goal missed' not in kernel_bench.table([better], {})
  found[1]['more'] = 'why not'
  assert bench.main(['kernels', '--chip=v6e', '--only=decode,logp']) == 1
  assert asked[0] == ('v5e', [c.op for c in kernel_bench.CASES])
  names = ['attention decode', 'logprobs forward', 'logprobs backward']
  assert asked[1] == ('v6e', names)
  assert 'more: not measured: why not' in capsys.readouterr().out


def test_ratio_of_cycles():
  side = lambda bundles, hbm: kernel_bench.Measured(bundles, 0, 0, hbm, 0)
  ratio = lambda *sides: kernel_bench.cycles_ratio(*sides, 500.0)
  # HBM needs 200 cycles for 100,000 bytes: it bounds the peer, then both.
  assert ratio(side(300, 1e5), side(100, 1e5)) == 1.5
  assert ratio(side(150, 1e5), side(100, 1e5)) == 1
  assert ratio(side(300, 1e5), side(250, 1e5)) == 1.2
  assert ratio(side(300, None), side(250, 1e5)) is None


def test_cases_are_distinct():
  assert len({c.op for c in kernel_bench.CASES}) == len(kernel_bench.CASES)
  assert sum(kernel_programs.LOADS) == kernel_programs.TOKENS


PROGRAMS = 'tests.diagnostics.programs:'


@pytest.mark.tpu_compile
def test_twice_the_rows_are_twice_the_trips():
  (once,), (twice,) = (
      tpu_cost.measure(PROGRAMS + 'matmul', dict(rows=rows), 'v5e')
      for rows in (256, 512)
  )
  assert once.kernel and once.name.startswith('tiles')
  ((size, trips),), ((size2, trips2),) = once.loops, twice.loops
  assert (trips, trips2) == (2 + 2, 4 + 2)  # two trips fill and empty
  assert size == size2
  assert twice.mxu == 2 * once.mxu > 0
  assert 0 < once.bundles < twice.bundles < 2 * once.bundles
  assert once.vmem_bytes > 2 * (128 * 256 * 2 + 128 * 256 * 4)
  # Rows in and out once, weights once: block indices decide what is copied.
  rows, weights = 256 * (256 * 2 + 256 * 4), 256 * 256 * 2
  assert once.hbm_bytes == rows + weights
  assert twice.hbm_bytes == 2 * rows + weights


@pytest.mark.tpu_compile
def test_the_listing_is_that_of_the_compiler():
  (op,) = tpu_cost.measure(PROGRAMS + 'sums', dict(loops=[30]), 'v5e')
  small = [(p.kind, p.runs) for p in op.parts]
  assert small == [
      (p.kind, p.runs) for p in tpu_listing.count(SUMS, loops=[30]).parts
  ]
  with pytest.raises(ValueError, match='sums.*1 loops depend on data'):
    tpu_cost.measure(PROGRAMS + 'sums', dict(loops=[]), 'v5e')


@pytest.mark.tpu_compile
def test_a_builder_that_fails():
  with pytest.raises(RuntimeError, match='no_such'):
    tpu_cost.measure(PROGRAMS + 'no_such', {}, 'v5e')


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize('chip', kernel_bench.CHIPS)
@pytest.mark.parametrize('case', kernel_bench.CASES, ids=lambda c: c.op)
def test_cases_are_measured(case, chip):
  (result,), failures = kernel_bench.measure(chip, [case])
  assert not failures
  assert result.ours > 0 and result.peer > 0
  assert 0 < result.mxu_share <= 1
