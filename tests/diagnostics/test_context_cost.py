"""Pages and temporaries by context: by hand, and of the real compiler."""

import json

import pytest

from agentic_rl.diagnostics import context_cost
from kernels_pallas import tpu_compiler
from launch import bench


def pages(phase, layer, context):
  return context_cost.pages_per_token(phase, layer, context)


def test_pages_by_hand():
  """Pages of 128: the current one, and four of a window of 512."""
  for context in (2048, 65536):
    assert pages('decode', 'window', context) == 5
    assert pages('prefill', 'window', context) == 5 / 8  # of a tile
    assert pages('decode', 'full', context) == context / 128
    assert pages('prefill', 'full', context) == context / 128 / 8
  # There are no five pages yet.
  assert pages('decode', 'window', 256) == 2


def test_selected_pages_are_bounded():
  # Sixteen past pages and the current one; fewer where there are fewer.
  assert pages('decode', 'block-sparse', 1024) == 8
  assert pages('decode', 'block-sparse', 4096) == 17
  assert pages('decode', 'block-sparse', 65536) == 17
  # The tokens of a tile share what they agree on and the current page.
  few, many = (pages('prefill', 'block-sparse', n) for n in (4096, 65536))
  assert few <= 4096 / 128 / 8
  assert few < many <= 16 + 1 / 8


def row(op, context, count):
  return context_cost.Row(op, 'v5e', context, count, 7)


def test_growth():
  rows = [
      row('decode window', 4096, 4.0),
      row('decode window', 8192, 4.0),
      row('decode block-sparse', 4096, 9.0),
      row('decode block-sparse', 8192, 17.0),
      row('decode full', 8192, 64.0),
  ]
  assert context_cost.growth(rows) == []
  rows += [row('decode window', 9216, 4.5), row('decode block-sparse', 9, 17.5)]
  assert context_cost.growth(rows) == [
      'decode window at 9216: 4.50 pages per token, at most 4.00 are allowed',
      'decode block-sparse at 9: 17.50 pages per token, at most 17.00 are'
      ' allowed',
  ]


HLO = """
%fused_computation.5 (p.1: f32[8,512]) -> f32[64,512] {
  %p.1 = f32[8,512]{1,0:T(8,128)} parameter(0)
  ROOT %b.1 = f32[64,512]{1,0:T(8,128)} broadcast(%p.1), dimensions={1}
}

ENTRY %main.7 (q.1: f32[64,512]) -> f32[64] {
  %q.1 = f32[64,512]{1,0:T(8,128)} parameter(0)
  %small.1 = f32[49,512]{1,0:T(8,128)} negate(%small.2)
  %other.1 = f32[64,511]{1,0:T(8,128)} negate(%other.2)
  %index.1 = s32[64,512]{1,0:T(8,128)} negate(%index.2)
  %near.1 = f32[64,512]{1,0:T(8,128)S(1)} negate(%near.2)
  ROOT %f.1 = f32[64]{0:T(128)} fusion(%q.1), kind=kLoop, calls=%fused_computation.5
}
"""


def test_scores_are_found():
  assert context_cost.scores_in_hbm(HLO, 64, 512) == []
  # Not in VMEM; 400 pages are 512 in the kernel of block selection.
  hlo = HLO.replace('S(1)', '')
  for count in (512, 400):
    assert context_cost.scores_in_hbm(hlo, 64, count) == ['f32[64,512]']
  # In a tuple, with a dimension of heads.
  more = '%t.1 = (f32[2,512,64]{2,1,0}, s32[]) custom-call(%q.1)\n  ROOT'
  hlo = HLO.replace('ROOT %f', more + ' %f')
  assert context_cost.scores_in_hbm(hlo, 64, 512) == ['f32[2,512,64]']
  assert context_cost.scores_in_hbm(hlo, 64, 300) == []


def test_bad_input(capsys):
  with pytest.raises(ValueError, match=r"chip='v9': allowed are \['tpu7x', "):
    context_cost.measure('v9')
  with pytest.raises(ValueError, match='context=1024: a multiple of 128 from'):
    context_cost.measure('v5e', [1024])
  assert bench.main(['context', '--contexts=4100']) == 2
  assert 'context=4100: a multiple of 128' in capsys.readouterr().err


def test_command(monkeypatch, tmp_path, capsys):
  found = [row('decode window', 4096, 4.0)], []
  asked = []

  def measure(chip, contexts, note):
    asked.append((chip, contexts))
    return found

  monkeypatch.setattr(context_cost, 'measure', measure)
  file = tmp_path / 'out.json'
  assert bench.main(['context', f'--json={file}']) == 0
  assert bench.main(['context', '--chip=v6e', '--contexts=4096,8192']) == 0
  assert asked == [
      ('v5e', list(context_cost.CONTEXTS)),
      ('v6e', [4096, 8192]),
  ]
  assert json.loads(file.read_text()) == [
      {
          'op': 'decode window',
          'chip': 'v5e',
          'context': 4096,
          'pages_per_token': 4.0,
          'temp_bytes': 7,
      }
  ]
  assert 'no float32 number for each token and page' in capsys.readouterr().out
  found[1].append('what does not hold')
  assert bench.main(['context']) == 1
  assert 'what does not hold' in capsys.readouterr().out


@pytest.mark.tpu_compile
def test_programs_hold_no_scores():
  """And the check can fail: plain XLA writes them."""
  rows, faults = context_cost.measure('v5e', [4096, 32768])
  assert faults == []
  assert len(rows) == 2 * len(context_cost.LAYERS) * len(context_cost.PHASES)
  for r in rows:
    if 'full' not in r.op:
      assert r.temp_bytes < 64 << 20, r
  fun, args = context_cost.program('prefill', 'block-sparse', 32768, 'xla')
  text = tpu_compiler.compile_for(fun, args, 'v5e').as_text()
  assert context_cost.scores_in_hbm(text, context_cost.CHUNK, 256)
