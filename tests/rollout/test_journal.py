import gzip
import json

import numpy as np
import pytest

from agentic_rl import types
from agentic_rl.rollout import journal


def trajectory(number, seed=0, length=40):
  """Random spans of drawn tokens; log-probs of every magnitude."""
  rng = np.random.default_rng([seed, number])
  sampled, turns, at = np.zeros(length, bool), [], 5
  while at < length:
    end = min(at + int(rng.integers(1, 6)), length)
    after = min(end + int(rng.integers(0, 4)), length)
    sampled[at:end] = True
    text = ['test', 'edit a.py 3 "x"\n', '⟨act⟩ \x00 é'][rng.integers(3)]
    action = types.Action(text, text[:4], bool(rng.integers(2)), at, end)
    turns.append(
        types.Turn(action, f's{at}', float(rng.normal()), 'ok\n', end, after)
    )
    at = after
  logp = np.zeros(length, np.float32)
  values = -np.exp(rng.normal(size=int(sampled.sum())) * 8)
  logp[sampled] = values.astype(np.float32)
  return types.Trajectory(
      rollout_id=number,
      task_id='0123456789abcdef',
      seed=int(rng.integers(1 << 31)),
      tokens=rng.integers(0, 500, length).astype(np.int32),
      sampled=sampled,
      logp_behavior=logp,
      routes=rng.integers(0, 4, (length, 2, 2)).astype(np.int16),
      weight_version=3,
      turns=tuple(turns),
      status=list(types.Status)[number % 5],
      reward=float(rng.normal()),
      info={'solved': False, 'wall_s': 0.25},
  )


def test_what_is_read_is_what_was_written(tmp_path):
  path = journal.path_of(tmp_path, 'rl', 12)
  assert path == tmp_path / 'trajectories' / 'rl-000012.jsonl.gz'
  written = [trajectory(n, length=6 + 9 * n) for n in range(20)]
  journal.write(path, written)
  read = list(journal.read(path))
  assert len(read) == 20
  for a, b in zip(written, read):
    for name in ('tokens', 'sampled', 'logp_behavior'):  # bit for bit
      one, two = getattr(a, name), getattr(b, name)
      assert one.dtype == two.dtype and one.tobytes() == two.tobytes()
    for name in ('rollout_id', 'task_id', 'seed', 'weight_version', 'turns'):
      assert getattr(a, name) == getattr(b, name)
    assert a.status is b.status
    assert (a.reward, a.info) == (b.reward, b.info)
    assert b.routes is None


def test_extreme_log_probs_keep_their_bits(tmp_path):
  item = trajectory(0)
  places = np.flatnonzero(item.sampled)
  bits = np.random.default_rng(0).integers(0, 1 << 32, 10**4, np.uint32)
  values = bits.view(np.float32)
  values = values[np.isfinite(values)]
  for lo in range(0, len(values) - len(places), len(places)):
    item.logp_behavior[places] = values[lo : lo + len(places)]
    line = json.loads(json.dumps(journal._to_json(item, None)))
    back = journal._from_json(line)
    assert back.logp_behavior.tobytes() == item.logp_behavior.tobytes()


def test_a_rollout_without_tokens(tmp_path):
  empty = trajectory(0, length=0)
  journal.write(tmp_path / 'a.gz', [empty])
  (read,) = journal.read(tmp_path / 'a.gz')
  assert len(read.tokens) == 0 and read.turns == ()
  assert read.tokens.dtype == np.int32 and read.sampled.dtype == bool


def test_no_trajectories(tmp_path):
  journal.write(tmp_path / 'a.gz', [])
  assert list(journal.read(tmp_path / 'a.gz')) == []


def test_advantages_stand_beside_their_turns(tmp_path):
  items = [trajectory(n) for n in range(2)]
  advantages = [np.arange(len(t.turns), dtype=np.float32) for t in items]
  journal.write(tmp_path / 'a.gz', items, advantages)
  with gzip.open(tmp_path / 'a.gz', 'rt') as file:
    lines = [json.loads(line) for line in file]
  for line, own in zip(lines, advantages):
    assert [t['advantage'] for t in line['turns']] == own.tolist()
  assert [t.turns for t in journal.read(tmp_path / 'a.gz')] == [
      t.turns for t in items
  ]


def test_a_file_depends_on_its_content_only(tmp_path):
  for name in ('a.gz', 'b.gz'):
    journal.write(tmp_path / 'deep' / name, [trajectory(1)])
  a, b = (tmp_path / 'deep' / name for name in ('a.gz', 'b.gz'))
  assert a.read_bytes() == b.read_bytes()
  assert sorted(p.name for p in a.parent.iterdir()) == ['a.gz', 'b.gz']


@pytest.mark.parametrize('line', ['{}', 'x', '[]', '3', '{"tokens": 1}', '""'])
def test_a_damaged_line_is_named(tmp_path, line):
  path = tmp_path / 'a.gz'
  good = json.dumps(journal._to_json(trajectory(0), None))
  path.write_bytes(gzip.compress(f'{good}\n{line}'.encode()))
  with pytest.raises(ValueError, match='a.gz line 2: not a trajectory'):
    list(journal.read(path))
