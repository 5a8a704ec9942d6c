"""The device bench on CPU: what it writes, what it finds, what it counts."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.diagnostics import device_bench
from agentic_rl.diagnostics import device_cases as cases
from agentic_rl.diagnostics import exactness_matrix as matrix
from kernels_pallas import numerics as nx
from kernels_pallas.row_ops import ops as rows
from kernels_pallas.row_ops import xla
from launch import bench

SMALL = cases.SMALL


@pytest.fixture
def only_rms_norm(monkeypatch):
  """Leaves one op of one implementation, and one timed case."""
  every = matrix.jobs
  keep = lambda job: (job.op, job.impl) == ('rms_norm', 'xla')
  monkeypatch.setattr(
      matrix, 'jobs', lambda sizes: [j for j in every(sizes) if keep(j)]
  )
  monkeypatch.setattr(cases, 'CASES', {'rms_norm': cases.CASES['rms_norm']})


def run(tmp_path):
  """Returns the exit code and the report of the command."""
  path = tmp_path / 'report.json'
  code = bench.main(['device', f'--json={path}'])
  return code, json.loads(path.read_text())


def test_what_it_writes(only_rms_norm, tmp_path, capsys):
  code, report = run(tmp_path)
  assert code == 0
  assert set(report) == {
      'machine', 'exactness', 'times', 'seconds', 'skipped', 'failed',
      'unequal', 'holds',
  }  # fmt: skip
  assert report['machine'] == {
      'platform': 'cpu',
      'device_kind': 'cpu',
      'devices': jax.device_count(),
      'jax': jax.__version__,
      'chip': None,
      'bf16_tflops': None,
      'memory_gb_s': None,
  }
  assert report['holds'] and report['skipped'] == report['failed'] == 0
  found = [(f['dtype'], f['check']) for f in report['exactness']]
  checks = ('batch', 'place', 'gradient')
  assert found == [(d, c) for d in matrix.DTYPES for c in checks]
  width = matrix.SMALL.width
  assert [f['compared'] for f in report['exactness'][:2]] == [
      5 * width,
      matrix.SMALL.rows * width,
  ]
  assert {f['unequal'] for f in report['exactness']} == {0}
  (row,) = report['times']
  assert row['op'] == 'rms_norm' and row['peer'] == 'XLA'
  assert row['ratio'] == pytest.approx(row['ours_ms'] / row['peer_ms'])
  assert row['gb_s'] > 0 and row['tflops'] == 0 and row['error'] == ''
  assert row['memory_share'] is row['flops_share'] is None
  text = capsys.readouterr()
  assert 'the times show the format only' in text.out
  assert '0 unequal in exact arms, 0 failed, 0 skipped' in text.out
  assert 'rms_norm         xla    bfloat16 batch' in text.err  # progress


def test_an_impure_row_op_is_found(only_rms_norm, tmp_path, monkeypatch):
  def impure(x, gain, eps, numerics):
    return xla.rms_norm(x, gain, eps, numerics) + 1e-2 * x[:1]

  broken = types.SimpleNamespace(rms_norm=impure)
  monkeypatch.setitem(rows.IMPLS, 'xla', broken)
  code, report = run(tmp_path)
  assert code == 1 and not report['holds'] and report['failed'] == 0
  unequal = {
      (f['dtype'], f['check']): f['unequal'] for f in report['exactness']
  }
  for dtype in matrix.DTYPES:
    assert unequal[dtype, 'batch'] > 0 and unequal[dtype, 'place'] > 0
  assert report['unequal'] == sum(unequal.values())


def test_the_matrix_has_what_runs_on_the_platform():
  def found(platform):
    with nx.target(platform):
      jobs = matrix.jobs(matrix.SMALL)
    return {(j.op, j.impl, j.dtype) for j in jobs if j.exact}

  on_cpu, on_gpu = found('cpu'), found('gpu')
  assert on_cpu == found('tpu') ^ {
      ('policy', impl, dtype)
      for impl in ('xla', 'pallas')
      for dtype in matrix.DTYPES
  }
  for op in ['policy', *matrix.OPS]:
    kernels = {d for o, i, d in on_gpu if (o, i) == (op, 'pallas')}
    assert kernels == (set() if op == 'fp8_matmul' else {'bfloat16'})
  assert {x for x in on_gpu if x[1] == 'xla'} == {
      x for x in on_cpu if x[1] == 'xla'
  }


@pytest.mark.parametrize('exact', [True, False])
def test_the_control_arm_may_differ(monkeypatch, exact):
  arm = ('policy', 'xla', 'float32', exact)
  found = matrix.Found(*arm, 'traffic', compared=9, unequal=4, flips=1)
  job = matrix.Job(*arm, lambda: [found])
  monkeypatch.setattr(matrix, 'jobs', lambda sizes: [job])
  monkeypatch.setattr(cases, 'CASES', {})
  report = device_bench.measure()
  assert report['unequal'] == (5 if exact else 0)  # bits and routes
  assert report['holds'] == (not exact)
  line = '9        4  1 routes differ' + '  control arm' * (not exact)
  assert line in device_bench.table(report)


def test_what_fails_is_a_row(only_rms_norm, tmp_path, monkeypatch, capsys):
  def refused(x):
    raise NotImplementedError('no such\nblock size')

  def case(ours, peers):
    side = lambda fun: cases.Program(fun.__name__, fun, [jnp.ones(8)])
    return lambda sizes: cases.Work(side(ours), list(map(side, peers)), 8, '8')

  def out_of_memory(sizes):
    raise RuntimeError('RESOURCE_EXHAUSTED')

  table = {
      'ours': case(refused, [jnp.sin]),
      'first peer': case(jnp.sin, [refused, jnp.cos]),
      'all peers': case(jnp.sin, [refused]),
      'arguments': out_of_memory,
  }
  monkeypatch.setattr(cases, 'CASES', table)
  monkeypatch.setattr(matrix, 'OPS', {'rms_norm': lambda *args: refused(0)})
  code, report = run(tmp_path)
  assert code == 1
  by_op = {t['op']: t for t in report['times']}
  why = 'refused: NotImplementedError: no such block size'
  assert by_op['ours']['error'] == why.replace('refused', 'ours')
  assert by_op['ours']['ours_ms'] is None
  assert (
      by_op['first peer']['peer'] == 'cos' and not by_op['first peer']['error']
  )
  assert by_op['all peers']['error'] == why
  assert by_op['all peers']['ours_ms'] > 0
  assert by_op['arguments']['error'] == 'ours: RuntimeError: RESOURCE_EXHAUSTED'
  errors = {f['error'] for f in report['exactness']}
  assert errors == {why.replace('refused', 'rms_norm')}
  assert report['failed'] == 3 + len(matrix.DTYPES)
  assert why in capsys.readouterr().out


def test_what_there_is_no_time_for(only_rms_norm, tmp_path, monkeypatch):
  monkeypatch.setattr(device_bench, 'BUDGET_S', -1)
  code, report = run(tmp_path)
  assert code == 0
  every = report['exactness'] + report['times']
  assert {row['error'] for row in every} == {device_bench.SKIPPED}
  assert report['skipped'] == len(every) == len(matrix.DTYPES) + 1


def test_every_round_is_run():
  """Each depends on the one before, whatever the compiler may leave out."""
  seen = []

  def count(x, y):
    seen.append(float(x.sum()))
    return np.asarray(x + y)

  def fun(x, y):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(count, shape, x, y)

  x = jnp.arange(4.0)
  program = cases.Program('callback', fun, [x, x])
  seconds, moved = device_bench.measure_program(program, 0.0, 3)
  assert seconds > 0 and moved == 3 * x.nbytes
  # To compile, to choose the number of programs, and three calls of one.
  assert seen == [6.0] * device_bench.ROUNDS * (2 + 3)


def test_shares_of_a_known_chip(monkeypatch):
  chips = {'cpu': ('tiny', device_bench.Chip(1e9, 1e6))}
  monkeypatch.setattr(device_bench, 'CHIPS', chips)
  assert device_bench.machine()['bf16_tflops'] == pytest.approx(1e-3)
  found = device_bench._rates(device_bench.Timed('x'), 5e8, 2.0, 10**6)
  assert found.ours_ms == 2000
  assert found.flops_share == pytest.approx(0.25)
  assert found.memory_share == pytest.approx(0.5)


@pytest.mark.parametrize('kind', ['causal', 'window', 'block-sparse'])
def test_counted_pairs(kind):
  """The pairs that a mask built token by token lets through."""
  work = cases.CASES[f'attention {kind}'](SMALL)
  pairs = 0
  for t in range(SMALL.row_tokens):
    for key in range(t + 1):
      if kind == 'window':
        pairs += t - key < SMALL.window
      elif kind == 'block-sparse':
        selected = np.asarray(work.ours.args[3])[t, 0]
        page = key // SMALL.page
        pairs += page == t // SMALL.page or page in selected
      else:
        pairs += 1
  pairs *= SMALL.tokens // SMALL.row_tokens * SMALL.heads
  assert work.flops == pairs * 4 * SMALL.head_width
  backward = cases.CASES[f'attention {kind} backward'](SMALL)
  assert backward.flops == 2.5 * work.flops


@pytest.mark.slow
@pytest.mark.parametrize(
    'op',
    [
        op
        for op in cases.CASES
        if not op.startswith('grouped') and 'block' not in op
    ],
)
def test_both_sides_do_the_same_work(op):
  """Equal up to rounding; gradients of a peer have other shapes."""
  work = cases.CASES[op](SMALL)
  (fun, args), (peer, peer_args) = work.ours.ready(), work.peers[0].ready()
  ours, theirs = jax.jit(fun)(*args), jax.jit(peer)(*peer_args)
  if op.startswith('attention') and work.ours.wrt:
    ours, theirs = ours[0], theirs[0]  # of the queries
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    a, b = (np.asarray(x, np.float64).reshape(-1) for x in (a, b))
    gap = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert gap < (0.05 if op == 'fp8_matmul' else 0.02)


@pytest.mark.slow
@pytest.mark.long
def test_all_of_it(tmp_path, monkeypatch):
  monkeypatch.setattr(device_bench, 'BUDGET_S', 3600)
  code, report = run(tmp_path)
  assert code == 0 and report['skipped'] == 0
  assert [t['op'] for t in report['times']] == list(cases.CASES)
  arms = {(f['op'], f['impl'], f['dtype']) for f in report['exactness']}
  for impl in ('xla', 'pallas'):
    assert ('fp8_matmul', impl, 'fp8') in arms
    for op in matrix.OPS.keys() - {'fp8_matmul'}:
      assert all((op, impl, dtype) in arms for dtype in matrix.DTYPES)
  policies = [f for f in report['exactness'] if f['op'] == 'policy']
  assert [f['exact'] for f in policies] == [True, True, False]
  assert all(f['compared'] > 200 for f in policies)
  assert policies[2]['unequal'] > 0  # on this platform the check can fail
