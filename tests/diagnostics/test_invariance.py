import json

import pytest

from launch import bench
from tests.smoke import runs


@pytest.mark.slow
def test_what_invariance_costs(tmp_path, capsys):
  """Both ratios of one run; above the limit the exit code is 1."""
  path = tmp_path / 'out.json'
  config = runs.ROOT / 'configs' / 'forkme.py'
  code = bench.main([
      'invariance', f'--config={config}', '--rounds=3', '--limit=0',
      f'--json={path}',
  ])  # fmt: skip
  report, text = json.loads(path.read_text()), capsys.readouterr().out
  assert code == 1 and report['holds'] is False
  for name, tokens in (
      ('sampler_ratio', 'decode_tokens_per_s'),
      ('learner_ratio', 'learner_tokens_per_s'),
  ):
    ratio = report[tokens + '_free'] / report[tokens]
    assert 0.1 < report[name] < 10
    assert report[name] == pytest.approx(ratio)
    assert f'{name:28s} {report[name]:.4g}' in text
