"""Tables of the reports: flush columns, narrow enough for a terminal."""

import pytest

from agentic_rl.diagnostics import mismatch_report
from agentic_rl.diagnostics import policy_matrix
from agentic_rl.diagnostics import precision
from agentic_rl.diagnostics import text_table

WIDEST = 100


def test_columns_are_flush():
  assert text_table.lines([['a', 'b', 'c'], ['left', '', '1,000']], left=2) == [
      'a     b      c',
      'left     1,000',
  ]


def test_rows_of_unequal_length():
  with pytest.raises(ValueError):
    text_table.lines([['a', 'b'], ['c']])


def widest(text):
  return max(map(len, text.splitlines()))


def test_reports_fit_a_terminal():
  counts = policy_matrix.Counts(250_000, 123_456, 123_456, 0, 12_345)
  arm = dict(side='gradient', arm='data=2,fsdp=2,expert=2', **counts._asdict())
  matrix = policy_matrix.table(
      {'arms': [arm], 'exact': False, **counts._asdict()}
  )
  assert widest(matrix) <= WIDEST
  names = (
      'kl', 'mean_abs_dlogp', 'max_abs_dlogp', 'top1', 'slots', 'experts'
  )  # fmt: skip
  figures = dict(positions=123_456, **dict.fromkeys(names, 0.0001234))
  bucket = {'from': 262_144, 'to': 524_288, **figures}
  two = precision.table(
      dict(
          a='bfloat16', b='fp8', sequences=1, context=524_288, layers=[],
          holds=True,
          exact={}, buckets=[bucket], **figures,
      )
  )  # fmt: skip
  assert widest(two) <= WIDEST and '262,144-524,287' in two
  figures = dict.fromkeys(
      [name for name, _ in mismatch_report.COLUMNS], 1.23e-5
  ) | dict(
      positions=50_000,
      unequal_bits=11_718,
      route_flips=1_234,
      routed_tokens=9,
      flip_rate_by_layer=[0.1],
      topk_hit_rate=0.999,
      multiplicative_error_max=1.0,
  )
  report = dict(
      figures,
      buckets=[{'from': 16_384, 'to': 32_768, **figures}],
      verdict='flat',
      slope=dict(per_1k=1.2e-5, low_per_1k=-1.2e-5, high_per_1k=1.2e-5),
      gradient=dict(unequal_bits=1, route_flips=1, max_abs_dlogp=1.23e-5),
      policy=dict(
          origin='x', layers=1, width=1, experts=1, precision='bfloat16',
          exact=True, impl='auto', platform='cpu',
      ),
      tokens=dict(origin='x', sequences=1, drawn_by_policy=True),
  )  # fmt: skip
  assert widest(mismatch_report.table(report)) <= WIDEST
