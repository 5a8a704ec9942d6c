"""The notebooks run from top to bottom, and what they store is of such a run."""

import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WALKTHROUGH = ROOT / 'colabs' / '00_walkthrough.ipynb'
LIMIT_S = 900  # of a cell: longer means that something hangs

# Absolute paths of any machine, in sources or outputs.
_PATH = re.compile(
    r'(?<![\w.>])/(?:bin|content|etc|home|mnt|opt|root|srv|tmp|usr|Users|var|work)'
    r'(?:/|\b)|[A-Z]:\\\\?Users|file://'
)
_COMPARED = re.compile(r'(\d+) log-probs compared, (\d+) unequal')


def read():
  notebook = nbformat.read(WALKTHROUGH, as_version=4)
  nbformat.validate(notebook)
  return notebook


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def printed(notebook) -> str:
  return '\n'.join(
      output.text
      for cell in code_cells(notebook)
      for output in cell.outputs
      if output.output_type == 'stream'
  )


def check_exactness(notebook):
  """Checks both arms, and the gradient program's own count."""
  text = printed(notebook)
  arms = [(int(n), int(bad)) for n, bad in _COMPARED.findall(text)]
  (compared, unequal), (compared_free, unequal_free) = arms
  assert compared > 100 and compared_free > 100
  assert unequal == 0
  assert unequal_free > 0  # the control arm: the comparison can fail
  assert re.search(rf'mismatch/compared +{compared}\b', text)
  assert re.search(r'mismatch/unequal_bits +0\b', text)
  assert re.search(r'router/flips +0\b', text)


def check_outputs(notebook):
  cells = code_cells(notebook)
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, len(cells) + 1))  # in order, none left out
  outputs = [output for cell in cells for output in cell.outputs]
  assert not [o for o in outputs if o.output_type == 'error']
  for cell in cells:
    shows = re.search(r'^ *(print|table)\(', cell.source, re.MULTILINE)
    assert bool(cell.outputs) >= bool(shows), cell.source
  check_exactness(notebook)


def test_stored_outputs():
  notebook = read()
  check_outputs(notebook)
  outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
  assert not [o for o in outputs if o.get('name') == 'stderr']  # no warnings


def test_no_machine_in_file():
  text = WALKTHROUGH.read_text()
  assert len(text) < 400_000
  assert not _PATH.findall(text)
  for cell in read().cells:
    assert not cell.metadata, cell.source  # no times of execution


def test_paths_are_found():
  for text in ('in /home/me/x', '"/tmp/a"', r'C:\\Users\\me', '(/root/x.py:3)'):
    assert _PATH.search(text), text
  for text in ('agentic_rl/tests/work/x', '</pre>', 'a / b', '../tmp'):
    assert not _PATH.search(text), text


@pytest.mark.slow
def test_runs_from_top_to_bottom():
  notebook = read()
  for cell in code_cells(notebook):
    cell.outputs, cell.execution_count = [], None
  nbclient.NotebookClient(
      notebook,
      timeout=LIMIT_S,
      resources={'metadata': {'path': str(ROOT)}},
      record_timing=False,
  ).execute()  # raises if a cell fails
  check_outputs(notebook)
