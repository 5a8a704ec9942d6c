import io
import json
import resource
import subprocess
import sys

import numpy as np
import pytest
import rich.console

from agentic_rl import metrics


def plain_console():
  return rich.console.Console(file=io.StringIO(), width=200)


def open_metrics(tmp_path, **kwargs):
  kwargs.setdefault('console', plain_console())
  return metrics.Metrics(tmp_path, **kwargs)


def lines(tmp_path):
  text = (tmp_path / metrics.JSONL).read_text()
  return [json.loads(line) for line in text.splitlines()]


def points(tmp_path, phase, tag):
  """The points that TensorBoard shows."""
  from tensorboard.backend.event_processing import event_accumulator

  folder = tmp_path / metrics.TENSORBOARD / phase
  accumulator = event_accumulator.EventAccumulator(str(folder))
  accumulator.Reload()
  if tag not in accumulator.Tags()['tensors'] + accumulator.Tags()['scalars']:
    return []
  return [(e.step, e.value) for e in accumulator.Scalars(tag)]


def test_rows_events_and_lines(tmp_path):
  with open_metrics(tmp_path) as writer:
    writer.start_phase('rl', total=10)
    writer.log(1, {'loss': np.float32(0.5), 'n': 3, 'verdict': 'flat'})
    writer.log(2, {'loss': 0.25, 'n': np.int64(4)}, show=['loss'])
    writer.log(2, {'solve': 0.5}, phase='heldout')
    screen = writer._screen._console.file.getvalue()
  rows = metrics.read_rows(tmp_path, 'rl')
  assert [r['loss'] for r in rows] == [0.5, 0.25]
  assert rows[0]['verdict'] == 'flat' and rows[0]['n'] == 3
  assert metrics.read_rows(tmp_path)[2]['phase'] == 'heldout'
  assert points(tmp_path, 'rl', 'loss') == [(1, 0.5), (2, 0.25)]
  assert points(tmp_path, 'heldout', 'solve') == [(2, 0.5)]
  assert screen.splitlines()[0] == '-- rl, 10 steps'
  assert 'rl 2/10 eta' in screen and screen.splitlines()[-1] == (
      'heldout 2  solve=0.5'
  )
  assert '\x1b' not in screen  # plain lines


def test_resume_drops_what_lies_beyond(tmp_path):
  with open_metrics(tmp_path) as writer:
    for step in (1, 2):
      writer.log(step, {'loss': float(step)}, phase='warm')
    for step in range(1, 6):
      writer.log(step, {'loss': float(step)}, phase='rl')
    writer.log(5, {'solve': 1.0}, phase='heldout')
  with open(tmp_path / metrics.JSONL, 'ab') as file:
    file.write(b'{"step": 6, "phase": "rl", "lo')  # killed while writing
  with open_metrics(tmp_path, resume={'warm': 2, 'rl': 3}) as writer:
    for step in (4, 5):
      writer.log(step, {'loss': step + 0.5}, phase='rl')
  assert [(r['phase'], r['step'], r['loss']) for r in lines(tmp_path)] == [
      ('warm', 1, 1.0),
      ('warm', 2, 2.0),
      ('rl', 1, 1.0),
      ('rl', 2, 2.0),
      ('rl', 3, 3.0),
      ('rl', 4, 4.5),
      ('rl', 5, 5.5),
  ]
  assert points(tmp_path, 'rl', 'loss') == [
      (1, 1.0),
      (2, 2.0),
      (3, 3.0),
      (4, 4.5),
      (5, 5.5),
  ]
  assert points(tmp_path, 'warm', 'loss') == [(1, 1.0), (2, 2.0)]
  assert points(tmp_path, 'heldout', 'solve') == []


def test_a_new_start_drops_everything(tmp_path):
  with open_metrics(tmp_path) as writer:
    writer.log(7, {'loss': 1.0}, phase='rl')
  with open_metrics(tmp_path) as writer:
    writer.log(0, {'loss': 2.0}, phase='rl')
    assert writer.rows() == lines(tmp_path)
  assert [r['loss'] for r in lines(tmp_path)] == [2.0]
  assert points(tmp_path, 'rl', 'loss') == [(0, 2.0)]


def test_alerts_when_a_bound_is_left_and_once(tmp_path):
  heard = []
  with open_metrics(
      tmp_path,
      alerts={'zero_share': (None, 0.7), 'entropy': (0.1, None)},
      on_alert=lambda *args: heard.append(args),
  ) as writer:
    writer.start_phase('rl')
    for step, share in enumerate([0.5, 0.8, 0.9, 0.6, 0.75]):
      writer.log(step, {'zero_share': share, 'entropy': 1.0})
    writer.log(5, {'entropy': 0.05, 'loss': float('nan')})
    writer.alert('disk_gb', 1.5, 'nearly full', step=5)
    screen = writer._screen._console.file.getvalue()
    rows = writer.rows()
  assert [(n, v) for n, v, _ in heard[:3]] == [
      ('zero_share', 0.8),
      ('zero_share', 0.75),
      ('entropy', 0.05),
  ]
  assert heard[3][0] == 'loss' and heard[3][2] == 'not finite'
  assert heard[4] == ('disk_gb', 1.5, 'nearly full')
  assert 'ALERT zero_share = 0.8: above 0.7' in screen
  assert len(rows) == 6 and rows[-1]['loss'] is None
  alerts = [row for row in lines(tmp_path) if 'alert' in row]
  assert [a['alert'] for a in alerts] == [h[0] for h in heard]
  assert alerts[0]['step'] == 1 and alerts[0]['phase'] == 'rl'


def test_live_table_on_a_terminal(tmp_path):
  console = rich.console.Console(
      file=io.StringIO(), force_terminal=True, width=80
  )
  with open_metrics(tmp_path, console=console) as writer:
    writer.start_phase('rl', total=4)
    for step in range(1, 4):
      writer.log(step, {'solve': step / 4, 'loss': -0.1})
      writer.tick(step, 'collecting')
    writer.note('a note')
  text = console.file.getvalue()
  assert 'solve' in text and '0.75' in text and 'rl 3/4 eta 0:0' in text
  assert 'a note' in text


def test_eta(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: now[0])
  eta = metrics._Eta('rl', total=50, done=10)
  assert eta.line() == 'rl 10/50'
  now[0] += 30
  eta.step = 20  # 3 s a step, 30 steps left
  assert eta.line() == 'rl 20/50 eta 1:30'
  assert metrics._clock(3725.4) == '1:02:05'


def test_png_and_summary(tmp_path):
  rows = [
      {
          'step': s,
          'solve': s / 10,
          'solve_low': 0,
          'solve_high': 1,
          'loss': None,
      }
      for s in range(5)
  ]
  path = tmp_path / 'curve.png'
  metrics.learning_curve_png(path, rows, title='run')
  assert path.read_bytes().startswith(b'\x89PNG')
  metrics.learning_curve_png(path, [], keys=['solve'])
  metrics.learning_curve_png(path, [])
  metrics.write_summary(
      tmp_path / 's.json', {'a': np.float32(0.5), 'b': float('inf'), 'c': [1]}
  )
  assert json.loads((tmp_path / 's.json').read_text()) == {
      'a': 0.5,
      'b': None,
      'c': [1],
  }
  assert not list(tmp_path.glob('.*tmp'))


def test_full_disk_names_the_file(tmp_path):
  writer = open_metrics(tmp_path)
  (tmp_path / 'old.json').write_text('old')
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (64, old[1]))
  try:
    with pytest.raises(OSError, match='is the disk full') as error:
      writer.log(1, {'text': 'x' * 100})
    with pytest.raises(OSError, match='is the disk full'):
      metrics.write_atomically(tmp_path / 'old.json', 'y' * 100)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
  assert metrics.JSONL in str(error.value)
  assert (tmp_path / 'old.json').read_text() == 'old'
  writer.close()
  # The line that was cut is dropped at the next start.
  with open_metrics(tmp_path, resume={'run': 9}) as again:
    again.log(2, {'a': 1})
    assert [r['step'] for r in again.rows()] == [2]


def test_does_not_import_jax(tmp_path):
  code = (
      'import sys, agentic_rl.metrics as m\n'
      'w = m.Metrics(sys.argv[1]); w.log(1, dict(a=1)); w.close()\n'
      'm.learning_curve_png(sys.argv[1] + "/a.png", w.rows())\n'
      "assert 'jax' not in sys.modules and 'tensorflow' not in sys.modules"
  )
  subprocess.run([sys.executable, '-c', code, str(tmp_path)], check=True)
