"""What a run says: live table, metrics.jsonl, TensorBoard, plots, summary.

One `Metrics` per run. Every `log` goes to three places: `metrics.jsonl` (one
JSON object per line with `step`, `phase` and `time_s`; the source of truth),
TensorBoard events in `tensorboard/<phase>/`, and the screen. Knows no JAX, so
that tools can read runs without it.

A resumed run says how far each phase had got; lines beyond that are dropped
whole or not at all, and TensorBoard is told to forget its points beyond it.
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any, Callable, Mapping, Sequence

JSONL = 'metrics.jsonl'
TENSORBOARD = 'tensorboard'
SUMMARY = 'summary.json'

Bounds = tuple[float | None, float | None]


class Metrics:
  """Writes the metrics of a run.

  Attributes:
    workdir: where the files lie.
    alerts: bounds (low, high) by metric, None for no bound; leaving them is an
      alert.
  """

  def __init__(
      self,
      workdir: str | os.PathLike,
      *,
      resume: Mapping[str, int] | None = None,
      alerts: Mapping[str, Bounds] | None = None,
      on_alert: Callable[[str, float, str], None] | None = None,
      console: Any = None,
  ):
    """Opens the files.

    Args:
      workdir: folder of the run, made if it is missing.
      resume: last step to keep of each phase; phases that are not named are
        dropped. None starts anew.
      alerts: see the class.
      on_alert: called with (name, value, message) as well.
      console: a rich Console, for tests.

    Raises:
      OSError: the folder can not be written.
    """
    self.workdir = pathlib.Path(workdir)
    self.alerts = dict(alerts or {})
    self._on_alert = on_alert
    self._resume = dict(resume or {})
    self._alerting: set[str] = set()
    self._boards: dict[str, _EventFile] = {}
    self._phase = 'run'
    self._screen = _Screen(console)
    self.workdir.mkdir(parents=True, exist_ok=True)
    path = self.workdir / JSONL
    if path.exists():
      _truncate(path, self._resume)
    for folder in sorted((self.workdir / TENSORBOARD).glob('*')):
      self._board(folder.name)  # forgets points beyond the step
    self._file = open(path, 'ab', buffering=0)

  def start_phase(
      self, phase: str, total: int | None = None, *, done: int = 0
  ) -> None:
    """Begins a phase; progress and ETA count from here.

    Args:
      phase: a short name, as 'warm_start' or 'rl': letters, digits, `_`, `-`.
      total: number of its steps, if known.
      done: steps that an earlier run has done.
    """
    self._phase = phase
    self._screen.start(phase, total, done)

  def log(
      self,
      step: int,
      values: Mapping[str, Any],
      *,
      phase: str | None = None,
      show: Sequence[str] | None = None,
  ) -> None:
    """Records values; numbers also go to TensorBoard.

    Args:
      step: the step of the phase, counted from 1 or 0 by the caller.
      values: scalars (Python, NumPy, 0-d arrays), strings or flat lists.
        Numbers that are not finite are written as null and raise an alert.
      phase: another phase than the current one, as 'heldout'.
      show: names for the screen; all numbers if None.

    Raises:
      OSError: the disk is full or gone.
    """
    phase = self._phase if phase is None else phase
    clean = {name: _scalar(value) for name, value in values.items()}
    numbers = {
        name: float(v)
        for name, v in clean.items()
        if isinstance(v, (int, float))
    }
    self._write({'step': int(step), 'phase': phase, **_finite(clean)})
    if numbers:
      self._board(phase).scalars(int(step), numbers)
    shown = clean if show is None else {k: clean[k] for k in show if k in clean}
    self._screen.row(phase, int(step), shown, progress=phase == self._phase)
    for name, value in numbers.items():
      self._check(name, value, int(step))

  def tick(self, step: int, text: str = '') -> None:
    """Moves the progress line of the phase without recording anything."""
    self._screen.tick(step, text)

  def note(self, message: str) -> None:
    """Prints a line above the table."""
    self._screen.print(message)

  def alert(self, name: str, value: float, message: str, step: int = 0) -> None:
    """Says loudly that a metric left its bounds, and records it.

    Args:
      name: the metric.
      value: its value.
      message: what it means and what to do.
      step: where it happened.
    """
    line = {'step': step, 'phase': self._phase, 'alert': name}
    line |= _finite({'value': value}) | {'message': message}
    self._write(line)
    self._screen.print(f'ALERT {name} = {value:.4g}: {message}', style='red')
    if self._on_alert is not None:
      self._on_alert(name, value, message)

  def rows(self, phase: str | None = None) -> list[dict[str, Any]]:
    """Returns the recorded rows without alerts, of one phase or of all."""
    return read_rows(self.workdir, phase)

  def close(self) -> None:
    """Flushes and closes everything; safe to call twice."""
    self._screen.close()
    for board in self._boards.values():
      board.close()
    self._boards.clear()
    self._file.close()

  def __enter__(self) -> Metrics:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _write(self, row: Mapping[str, Any]) -> None:
    row = {**row, 'time_s': round(time.time(), 3)}
    data = (json.dumps(row, allow_nan=False) + '\n').encode()
    try:
      written = self._file.write(data)
      if written != len(data):
        raise OSError(28, 'short write')
    except OSError as error:
      raise _disk_error(error, self.workdir / JSONL) from None

  def _board(self, phase: str) -> _EventFile:
    if phase not in self._boards:
      if not re.fullmatch(r'[\w-]+', phase):
        raise ValueError(f'phase {phase!r}: use letters, digits, _ and -')
      folder = self.workdir / TENSORBOARD / phase
      first = self._resume.get(phase, -1) + 1
      self._boards[phase] = _EventFile(folder, first)
    return self._boards[phase]

  def out_of_bounds(self, name: str, value: float) -> str:
    """Returns which bound of `alerts` a value leaves, '' for none."""
    low, high = self.alerts.get(name, (None, None))
    if not math.isfinite(value):
      return 'not finite'
    if low is not None and value < low:
      return f'below {low:g}'
    if high is not None and value > high:
      return f'above {high:g}'
    return ''

  def _check(self, name: str, value: float, step: int) -> None:
    """Alerts once when a metric leaves its bounds, again after it was back."""
    message = self.out_of_bounds(name, value)
    if message and name not in self._alerting:
      self.alert(name, value, message, step)
    if message:
      self._alerting.add(name)
    else:
      self._alerting.discard(name)


# ---------------------------------------------------------------------- files


def write_atomically(path: str | os.PathLike, data: str | bytes) -> None:
  """Writes a file whole or not at all, also when power fails.

  Args:
    path: the file.
    data: its content.

  Raises:
    OSError: with the path, as when the disk is full; the old file stays.
  """
  target = pathlib.Path(path)
  temporary = target.with_name(f'.{target.name}.{os.getpid()}.tmp')
  try:
    with open(temporary, 'wb') as file:
      file.write(data.encode() if isinstance(data, str) else data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, target)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise _disk_error(error, target) from None


def write_summary(path: str | os.PathLike, summary: Mapping[str, Any]) -> None:
  """Writes a summary as JSON, whole or not at all."""
  clean = {name: _scalar(value) for name, value in summary.items()}
  text = json.dumps(_finite(clean), indent=2, allow_nan=False)
  write_atomically(path, text + '\n')


def read_rows(
    workdir: str | os.PathLike, phase: str | None = None
) -> list[dict[str, Any]]:
  """Reads the rows of a run, without alerts, of one phase or of all."""
  rows = _parsed(pathlib.Path(workdir) / JSONL)
  return [
      row
      for _, row in rows
      if 'alert' not in row and phase in (None, row.get('phase'))
  ]


def _parsed(path: pathlib.Path):
  """Yields (line, row); a line that was cut by a kill is left out."""
  if not path.exists():
    return
  for line in path.read_bytes().splitlines(keepends=True):
    try:
      row = json.loads(line)
    except ValueError:
      continue
    if line.endswith(b'\n') and isinstance(row, dict):
      yield line, row


def _truncate(path: pathlib.Path, keep: Mapping[Any, int]) -> None:
  lines = [
      line
      for line, row in _parsed(path)
      if row.get('step', 0) <= keep.get(row.get('phase'), -1)
  ]
  write_atomically(path, b''.join(lines))


def _disk_error(error: OSError, path: pathlib.Path) -> OSError:
  reason = error.strerror or str(error)
  return OSError(error.errno, f'{reason} (is the disk full?)', str(path))


def _scalar(value: Any) -> Any:
  if hasattr(value, 'tolist'):  # NumPy or JAX
    return value.tolist()
  return value


def _finite(value: Any) -> Any:
  """Replaces numbers that JSON does not know by None."""
  if isinstance(value, Mapping):
    return {k: _finite(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(v) for v in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


class _EventFile:
  """TensorBoard events of one phase; a session start purges what follows."""

  def __init__(self, folder: pathlib.Path, first_step: int):
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.summary.writer import record_writer

    self._event = event_pb2.Event
    self._summary = summary_pb2.Summary
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads files in the order of their names.
    number = len(list(folder.glob('events.out.tfevents.*')))
    name = f'events.out.tfevents.{int(time.time()):010d}.{number:04d}'
    self._file = open(folder / name, 'xb')
    self._records = record_writer.RecordWriter(self._file)
    self._add(file_version='brain.Event:2')
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(step=first_step, session_log=start)
    self._file.flush()

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Writes a point for each value."""
    points = [
        self._summary.Value(tag=tag, simple_value=value)
        for tag, value in values.items()
    ]
    self._add(step=step, summary=self._summary(value=points))
    self._file.flush()

  def _add(self, **kwargs) -> None:
    event = self._event(wall_time=time.time(), **kwargs)
    self._records.write(event.SerializeToString())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


# --------------------------------------------------------------------- screen


class _Screen:
  """A live table on a terminal, plain lines elsewhere."""

  ROWS = 12
  REFRESH_S = 0.2

  def __init__(self, console: Any = None):
    if console is None:
      import rich.console

      console = rich.console.Console(file=sys.stdout, highlight=False)
    self._console = console
    self._live: Any = None
    self._rows: collections.deque = collections.deque(maxlen=self.ROWS)
    self._drawn_s = 0.0
    self._eta = _Eta()
    self._text = ''

  def start(self, phase: str, total: int | None, done: int) -> None:
    self._stop_live()
    self._rows.clear()
    self._eta = _Eta(phase, total, done)
    self._text = ''
    if not self._console.is_terminal:
      steps = '' if total is None else f', {total - done} steps'
      self.print(f'-- {phase}{steps}')

  def row(
      self, phase: str, step: int, values: Mapping[str, Any], *, progress: bool
  ) -> None:
    if progress:
      self._eta.step, self._text = step, ''
    if self._console.is_terminal:
      self._rows.append((phase, step, values))
      self._draw(force=True)
      return
    cells = ' '.join(f'{k}={_shown(v)}' for k, v in values.items())
    head = self._eta.line() if progress else f'{phase} {step}'
    self.print(f'{head}  {cells}')

  def tick(self, step: int, text: str) -> None:
    self._eta.step, self._text = step, text
    if self._console.is_terminal:
      self._draw(force=False)

  def print(self, message: str, style: str | None = None) -> None:
    self._console.print(
        message, style=style, markup=False, highlight=False, soft_wrap=True
    )

  def close(self) -> None:
    self._stop_live()

  def _stop_live(self) -> None:
    if self._live is not None:
      self._live.update(self._table(), refresh=True)
      self._live.stop()
      self._live = None

  def _draw(self, *, force: bool) -> None:
    now = time.monotonic()
    if not force and now - self._drawn_s < self.REFRESH_S:
      return
    self._drawn_s = now
    if self._live is None:
      import rich.live

      # No refresh thread: it would take time from the run.
      self._live = rich.live.Live(console=self._console, auto_refresh=False)
      self._live.start()
    self._live.update(self._table(), refresh=True)

  def _table(self) -> Any:
    import rich.console
    import rich.table
    import rich.text

    caption = '  '.join(filter(None, [self._eta.line(), self._text]))
    table = rich.table.Table(box=None, pad_edge=False)
    names = list(dict.fromkeys(n for _, _, vs in self._rows for n in vs))
    for name in ['phase', 'step']:
      table.add_column(name, justify='right')
    room = self._console.width - 2 * 12
    shown = []
    for name in names:
      # The last part, in words: heads break between them.
      head = name.rpartition('/')[2].replace('_', ' ')
      width = max(6, *map(len, head.split()))
      room -= width + 2
      if room < 0:
        break  # what does not fit is in the files
      shown.append(name)
      table.add_column(head, justify='right', min_width=width)
    for phase, step, values in self._rows:
      cells = [_shown(values.get(name, '')) for name in shown]
      table.add_row(phase, str(step), *cells)
    return rich.console.Group(table, rich.text.Text(caption))


class _Eta:
  """Steps done, and when the phase will end at the present pace."""

  def __init__(self, phase: str = '', total: int | None = None, done: int = 0):
    self.phase, self.total, self.done, self.step = phase, total, done, done
    self.began_s = time.monotonic()

  def line(self) -> str:
    if self.total is None:
      return f'{self.phase} {self.step}'
    text = f'{self.phase} {self.step}/{self.total}'
    made = self.step - self.done
    if made > 0:
      spent_s = time.monotonic() - self.began_s
      left_s = spent_s / made * max(self.total - self.step, 0)
      text += f' eta {_clock(left_s)}'
    return text


def _clock(seconds: float) -> str:
  minutes, seconds_left = divmod(int(seconds + 0.5), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02d}:{seconds_left:02d}'
  return f'{minutes}:{seconds_left:02d}'


def _shown(value: Any) -> str:
  if isinstance(value, float):
    return f'{value:.4g}'
  return str(value)


# ---------------------------------------------------------------------- plots


def learning_curve_png(
    path: str | os.PathLike,
    rows: Sequence[Mapping[str, Any]],
    *,
    keys: Sequence[str] | None = None,
    x: str = 'step',
    title: str = '',
) -> None:
  """Draws metrics against steps, one panel each, without a display.

  A key with `<key>_low` and `<key>_high` beside it gets a band.

  Args:
    path: the PNG file, written whole or not at all.
    rows: as `Metrics.rows` returns them.
    keys: what to draw; by default up to six numeric ones.
    x: the horizontal axis.
    title: of the figure.

  Raises:
    OSError: the file can not be written.
  """
  import io

  from matplotlib import figure
  from matplotlib.backends import backend_agg

  if keys is None:
    keys = _numeric_keys(rows, x)[:6]
  keys = list(keys) or ['nothing recorded']
  columns = min(len(keys), 3)
  lines = math.ceil(len(keys) / columns)
  fig = figure.Figure(
      figsize=(4.2 * columns, 3.0 * lines), layout='constrained'
  )
  backend_agg.FigureCanvasAgg(fig)
  for i, key in enumerate(keys):
    axes = fig.add_subplot(lines, columns, i + 1)
    xs, ys = _series(rows, x, key)
    axes.plot(xs, ys, marker='.' if len(xs) < 100 else '', linewidth=1.4)
    low_x, low = _series(rows, x, f'{key}_low')
    high_x, high = _series(rows, x, f'{key}_high')
    if low and low_x == high_x:
      axes.fill_between(low_x, low, high, alpha=0.25, linewidth=0)
    axes.set_title(key, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.grid(alpha=0.3)
  if title:
    fig.suptitle(title, fontsize=11)
  buffer = io.BytesIO()
  fig.savefig(buffer, format='png', dpi=110)
  write_atomically(path, buffer.getvalue())


def _numeric_keys(rows: Sequence[Mapping[str, Any]], x: str) -> list[str]:
  skip = {x, 'step', 'phase', 'time_s'}
  names = dict.fromkeys(
      name
      for row in rows
      for name, value in row.items()
      if name not in skip and isinstance(value, (int, float))
  )
  return [n for n in names if not n.endswith(('_low', '_high'))]


def _series(rows, x: str, key: str) -> tuple[list[float], list[float]]:
  points = [
      (row[x], row[key])
      for row in rows
      if isinstance(row.get(key), (int, float)) and row.get(x) is not None
  ]
  return [p[0] for p in points], [p[1] for p in points]
