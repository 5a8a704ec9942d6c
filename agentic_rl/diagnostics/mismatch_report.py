"""The report of `launch/verify.py mismatch` for people: a text and a page.

The page is one file of HTML; its plots are inside it.
"""

from __future__ import annotations

import base64
import html
import io
import json
from typing import Any, Mapping

import numpy as np

from agentic_rl.diagnostics import text_table

ARMS = {'': 'as configured', 'control': 'control (no invariance)'}
_COLORS = {'': '#1f6f8b', 'control': '#d1495b'}
_TOTALS = (
    ('positions', 'positions compared'),
    ('unequal_bits', 'log-probs with unequal bits'),
    ('route_flips', 'routes that differ'),
    ('max_abs_dlogp', 'max |Δ log-prob|'),
    ('mean_abs_dlogp', 'mean |Δ log-prob|'),
    ('kl_k1', 'KL, k1'),
    ('kl_k3', 'KL, k3'),
    ('outside_10_percent', 'ratios outside [0.9, 1.1]'),
    ('outside_1_percent', 'ratios outside [0.99, 1.01]'),
    ('topk_hit_rate', 'top-k hit rate'),
    ('multiplicative_error', 'multiplicative error, mean'),
    ('multiplicative_error_max', 'multiplicative error, max'),
)  # fmt: skip
COLUMNS = (
    ('positions', 'positions'),
    ('unequal_bits', 'unequal'),
    ('route_flips', 'flips'),
    ('flip_rate', 'flip rate'),
    ('kl_k3', 'KL k3'),
    ('kl_k1', 'KL k1'),
    ('max_abs_dlogp', 'max|Δ|'),
    ('mean_abs_dlogp', 'mean|Δ|'),
    ('outside_10_percent', '>10 %'),
    ('outside_1_percent', '>1 %'),
    ('topk_hit_rate', 'top-k'),
    ('multiplicative_error', 'mult. err'),
)
# Of these, what the text has no room for; the page and the report have it.
_PAGE_ONLY = ('flip_rate', 'kl_k1', 'outside_10_percent')
_VERDICTS = {
    'exact': 'no bit and no route differs',
    'flat': 'they differ, and not more at longer contexts',
    'accumulating': 'they differ, and more at longer contexts',
}


def arms(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
  """Returns the report of each arm: '' as configured, and 'control'."""
  found = {'': report}
  if 'control' in report:
    found['control'] = report['control']
  return found


def _show(value: Any) -> str:
  if value is None:
    return '-'
  if isinstance(value, float):
    return f'{value:.3g}'
  return f'{value:,}' if isinstance(value, int) else str(value)


def _cell(figures: Mapping[str, Any], name: str) -> str:
  if name in ('route_flips', 'flip_rate') and not figures['routed_tokens']:
    return '-'  # no route was compared
  if name == 'flip_rate':
    return _show(float(np.mean(figures['flip_rate_by_layer'])))
  return _show(figures[name])


def _meaning(report: Mapping[str, Any]) -> str:
  """Returns what the verdict says."""
  verdict = report['verdict']
  if report['routed_tokens']:
    return _VERDICTS[verdict]
  text = 'no bit differs' if verdict == 'exact' else _VERDICTS[verdict]
  return f'{text}; no route was compared'


def _range(bucket: Mapping[str, Any]) -> str:
  return f'{bucket["from"]:,}-{bucket["to"] - 1:,}'


def _slope(arm: Mapping[str, Any]) -> str:
  fitted = arm['slope']
  if fitted['low_per_1k'] is None:
    return 'unknown: too few contexts'
  low, high = fitted['low_per_1k'], fitted['high_per_1k']
  return (
      f'{fitted["per_1k"]:.2g} in 1,000 tokens, 95 % interval'
      f' [{low:.2g}, {high:.2g}]'
  )


def table(report: Mapping[str, Any]) -> str:
  """Returns the report as text."""
  lines = []
  for head, about in (('policy', _policy(report)), ('tokens', _tokens(report))):
    lines += [f'{head:10s}{about[0]}', f'{"":10s}{about[1]}']
  for name, arm in arms(report).items():
    lines += ['', f'{ARMS[name]}: {arm["verdict"]}']
    lines += [f'  {text:30s}{_cell(arm, key)}' for key, text in _TOTALS]
    own = arm['gradient']
    lines += [
        f'  {"slope of |Δ log-prob|":30s}{_slope(arm)}',
        f'  {"in the gradient program":30s}{own["unequal_bits"]:,} unequal,'
        f' {_cell(arm | own, "route_flips")} routes differ,'
        f' max |Δ| {own["max_abs_dlogp"]:.3g}',
    ]
    shown = [c for c in COLUMNS if c[0] not in _PAGE_ONLY]
    rows = [['context', *(text for _, text in shown)]]
    for b in arm['buckets']:
      rows.append([_range(b), *(_cell(b, key) for key, _ in shown)])
    lines += [f'  {line}' for line in text_table.lines(rows)]
  lines += [
      '',
      f'verdict: {report["verdict"]} ({_meaning(report)})',
  ]
  return '\n'.join(lines)


def _policy(report) -> tuple[str, str]:
  """Returns where the policy is from, and what it is."""
  p = report['policy']
  rules = 'exact' if p['exact'] else 'not exact'
  return p['origin'], (
      f'{p["layers"]} layers of width {p["width"]}, {p["experts"]} experts,'
      f' {p["precision"]}, {rules}, impl {p["impl"]} on {p["platform"]}'
  )


def _tokens(report) -> tuple[str, str]:
  """Returns where the tokens are from, and what they are."""
  t = report['tokens']
  given = '; given, not drawn by these weights: KL figures are means over them'
  kind = '' if t['drawn_by_policy'] else given
  return t['origin'], f'{t["sequences"]:,} sequences{kind}'


# -------------------------------------------------------------------- the page

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } .wide { overflow-x: auto; }
.verdict { font-size: 1.2rem; padding: .6rem 1rem; border-left: 6px solid; }
.exact { border-color: #2a9d5c; background: #eef8f2; }
.flat { border-color: #e0a100; background: #fdf7e6; }
.accumulating { border-color: #d1495b; background: #fcedef; }
details { margin-top: 2rem; } pre { font-size: .75rem; overflow-x: auto; }
"""


def page(report: Mapping[str, Any]) -> str:
  """Returns the report as one HTML page with its plots inside."""
  found = arms(report)
  esc = html.escape
  verdict = report['verdict']
  head = ''.join(f'<th>{esc(ARMS[name])}</th>' for name in found)
  rows = ''.join(
      f'<tr><td>{esc(text)}</td>'
      + ''.join(f'<td>{_cell(arm, key)}</td>' for arm in found.values())
      + '</tr>'
      for key, text in (('verdict', 'verdict'), *_TOTALS)
  )
  rows += (
      '<tr><td>slope of |Δ log-prob|</td>'
      + ''.join(f'<td>{esc(_slope(arm))}</td>' for arm in found.values())
      + '</tr>'
  )
  rows += (
      '<tr><td>unequal bits in the gradient program</td>'
      + ''.join(
          f'<td>{arm["gradient"]["unequal_bits"]:,}</td>'
          for arm in found.values()
      )
      + '</tr>'
  )
  picture = base64.b64encode(plots(report)).decode()
  parts = [
      '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width">',
      f'<title>Mismatch: {verdict}</title><style>{_STYLE}</style></head><body>',
      '<h1>Mismatch between sampler and learner</h1>',
      f'<p class="verdict {verdict}"><b>{verdict}</b>: {_meaning(report)};'
      f' {report["unequal_bits"]:,} unequal log-probs and'
      f' {_cell(report, "route_flips")} flipped routes over'
      f' {report["positions"]:,} positions.</p>',
      f'<p>Policy: {esc("; ".join(_policy(report)))}.<br>'
      f'Tokens: {esc("; ".join(_tokens(report)))}.</p>',
      f'<table><tr><th></th>{head}</tr>{rows}</table>',
      f'<img alt="plots by context length" src="data:image/png;base64,{picture}"'
      '>',
  ]
  for name, arm in found.items():
    parts.append(
        f'<h2>By context length, {esc(ARMS[name])}</h2>{_buckets(arm)}'
    )
  text = json.dumps(report, indent=1)
  parts.append(
      f'<details><summary>The whole report</summary><pre>{esc(text)}</pre>'
      '</details></body></html>'
  )
  return '\n'.join(parts)


def _buckets(arm) -> str:
  head = ''.join(f'<th>{html.escape(text)}</th>' for _, text in COLUMNS)
  rows = ''.join(
      f'<tr><td>{_range(b)}</td>'
      + ''.join(f'<td>{_cell(b, key)}</td>' for key, _ in COLUMNS)
      + '</tr>'
      for b in arm['buckets']
  )
  return (
      f'<div class="wide"><table><tr><th>context</th>{head}</tr>{rows}</table>'
      '</div>'
  )


def plots(report: Mapping[str, Any]) -> bytes:
  """Returns a PNG: the figures of both arms against the context length."""
  from matplotlib import figure  # slow to import
  from matplotlib.backends import backend_agg

  fig = figure.Figure(figsize=(12, 7.2), layout='constrained')
  backend_agg.FigureCanvasAgg(fig)
  axes = fig.subplots(2, 3).ravel()
  panels: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
      (
          '|Δ log-prob|',
          (('max_abs_dlogp', '-', 'max'), ('mean_abs_dlogp', '--', 'mean')),
      ),
      ('KL(sampler || learner), k3', (('kl_k3', '-', ''),)),
      (
          'share of ratios outside',
          (
              ('outside_10_percent', '-', '[0.9, 1.1]'),
              ('outside_1_percent', '--', '[0.99, 1.01]'),
          ),
      ),
      (
          'multiplicative error of a sequence',
          (
              ('multiplicative_error_max', '-', 'max'),
              ('multiplicative_error', '--', 'mean'),
          ),
      ),
      ('top-k hit rate', (('topk_hit_rate', '-', ''),)),
  )
  for ax, (title, lines) in zip(axes, panels):
    _panel(ax, report, title, lines)
  _routes(axes[5], report)
  buffer = io.BytesIO()
  fig.savefig(buffer, format='png', dpi=120)
  return buffer.getvalue()


def _panel(ax, report, title, lines) -> None:
  """Draws figures against the end of their bucket, zeros included."""
  smallest = np.inf
  for name, arm in arms(report).items():
    x = [b['to'] for b in arm['buckets']]
    for key, style, label in lines:
      y = [np.nan if b[key] is None else b[key] for b in arm['buckets']]
      smallest = min([smallest, *(v for v in y if v > 0)])
      text = f'{ARMS[name]} {label}'.strip()
      ax.plot(x, y, style, marker='o', ms=4, color=_COLORS[name], label=text)
  ax.set_xscale('log', base=2)
  if lines[0][0] == 'topk_hit_rate':
    ax.set_ylim(top=1.0)
    if not np.isfinite(smallest):
      _nothing(ax, 'not known')
  elif np.isfinite(smallest):
    # Linear near zero, so that an exact zero has a place.
    ax.set_yscale('symlog', linthresh=smallest)
    ax.set_ylim(bottom=0)
  else:
    _nothing(ax, '0 everywhere')
  _label(ax, title, 'context, tokens (end of the bucket)')
  ax.legend(fontsize=7, handlelength=3)


def _routes(ax, report) -> None:
  """Draws the flip rate of each layer."""
  found = arms(report)
  for i, (name, arm) in enumerate(found.items()):
    rates = arm['flip_rate_by_layer']
    x = np.arange(len(rates)) + 0.8 * (i + 0.5) / len(found) - 0.4
    ax.bar(x, rates, 0.8 / len(found), color=_COLORS[name], label=ARMS[name])
  if not report['routed_tokens']:
    _nothing(ax, 'no route was compared')
  elif not any(arm['route_flips'] for arm in found.values()):
    _nothing(ax, 'no route differs')
  ax.xaxis.get_major_locator().set_params(integer=True)
  _label(ax, 'route-flip rate', 'layer with experts')
  ax.legend(fontsize=7, handlelength=3)


def _nothing(ax, text) -> None:
  ax.set_ylim(0, 1)
  ax.text(0.5, 0.5, text, transform=ax.transAxes, ha='center')


def _label(ax, title, below) -> None:
  ax.set_title(title, fontsize=10)
  ax.set_xlabel(below, fontsize=8)
  ax.tick_params(labelsize=8)
  ax.grid(alpha=0.3)
