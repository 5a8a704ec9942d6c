import numpy as np
import pytest

from agentic_rl import types
from agentic_rl.learner import pack as pack_lib

PAGE = 8
FIELDS = ('weights', 'advantages', 'logp_behavior', 'sampled')


def example(length, seed=0, routes=True):
  rng = np.random.default_rng([seed, length])
  sampled = rng.random(length) < 0.5
  return pack_lib.Example(
      tokens=rng.integers(1, 99, length).astype(np.int32),
      weights=sampled.astype(np.float32),
      advantages=rng.normal(size=length).astype(np.float32),
      logp_behavior=rng.normal(size=length).astype(np.float32),
      sampled=sampled,
      routes=rng.integers(0, 4, (length, 2, 2)).astype(np.int16)
      if routes
      else None,
  )


def pack(examples, row_tokens=32, rows=1):
  return pack_lib.pack(examples, row_tokens=row_tokens, page=PAGE, rows=rows)


def places(batch, number):
  """Returns (row, start, length) of a sequence."""
  row, at = np.nonzero(batch.segments_BT == number)
  assert len(set(row)) == 1
  assert (np.diff(at) == 1).all()
  return int(row[0]), int(at[0]), len(at)


def test_by_hand():
  first = pack_lib.Example(
      np.array([5, 6, 7, 8], np.int32),
      np.array([0, 0, 1, 1], np.float32),
      np.array([9, 9, 2, 3], np.float32),
      np.array([0, 0, -1, -2], np.float32),
      np.array([0, 0, 1, 1], bool),
  )
  second = pack_lib.from_text(np.arange(1, 10), np.full(9, 0.5, np.float32))
  batch = pack([first, second], rows=2)
  assert batch.tokens_BT.shape == (2, 32)
  # The longer one first, then the other on the next page.
  assert places(batch, 1) == (0, 0, 9)
  assert places(batch, 0) == (0, 16, 4)
  assert batch.tokens_BT[0, 16:21].tolist() == [5, 6, 7, 8, 0]
  assert batch.targets_BT[0, 16:21].tolist() == [6, 7, 8, 0, 0]
  assert batch.positions_BT[0, 7:20].tolist() == [
      7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3,
  ]  # fmt: skip
  assert batch.weights_BT[0, 16:20].tolist() == [0, 1, 1, 0]
  assert batch.advantages_BT[0, 16:20].tolist() == [9, 2, 3, 0]
  assert batch.logp_behavior_BT[0, 16:20].tolist() == [0, -1, -2, 0]
  assert batch.sampled_BT[0, 16:20].tolist() == [False, True, True, False]
  assert batch.weights_BT[0, :9].tolist() == [0.5] * 8 + [0]
  assert not batch.sampled_BT[0, :16].any()
  assert batch.routes_BTLk is None
  assert (batch.segments_BT[1] == -1).all()


def test_every_token_keeps_what_belongs_to_it():
  rng = np.random.default_rng(0)
  examples = [example(int(n), i) for i, n in enumerate(rng.integers(1, 33, 40))]
  batch = pack(examples, rows=4)
  assert len(batch.tokens_BT) % 4 == 0
  taken = np.zeros(batch.tokens_BT.shape, int)
  for number, e in enumerate(examples):
    row, start, length = places(batch, number)
    assert length == len(e.tokens) and start % PAGE == 0
    here, ahead = slice(start, start + length), slice(start, start + length - 1)
    taken[row, start : start + -(-length // PAGE) * PAGE] += 1
    np.testing.assert_array_equal(batch.tokens_BT[row, here], e.tokens)
    np.testing.assert_array_equal(batch.targets_BT[row, ahead], e.tokens[1:])
    np.testing.assert_array_equal(batch.positions_BT[row, here], range(length))
    # Case 7: row i of the routes belongs to token i.
    np.testing.assert_array_equal(batch.routes_BTLk[row, here], e.routes)
    for field in FIELDS:
      packed = getattr(batch, field + '_BT')
      np.testing.assert_array_equal(packed[row, ahead], getattr(e, field)[1:])
      assert packed[row, start + length - 1] == 0  # nothing follows the last
  assert taken.max() == 1
  padding = batch.segments_BT == -1
  for name in ('tokens', 'targets', *FIELDS):
    assert not getattr(batch, name + '_BT')[padding].any()
  assert (batch.routes_BTLk[padding] == -1).all()  # case 7: none, not expert 0
  assert (batch.positions_BT[:, ::PAGE] % PAGE == 0).all()
  assert (np.diff(batch.positions_BT.reshape(-1, PAGE)) == 1).all()


def test_rows_are_filled_longest_first():
  batch = pack([example(n) for n in (8, 32, 16, 24, 15)])
  assert [places(batch, i)[:2] for i in range(5)] == [
      (1, 24), (0, 0), (2, 0), (1, 0), (2, 16),
  ]  # fmt: skip


@pytest.mark.parametrize('rows, expected', [(1, 3), (2, 4), (3, 3), (5, 5)])
def test_rows_are_rounded_up(rows, expected):
  batch = pack([example(32, i) for i in range(3)], rows=rows)
  assert len(batch.tokens_BT) == expected


def test_some_routes_unknown():
  batch = pack([example(5, routes=False), example(7)])
  row, start, _ = places(batch, 0)
  assert (batch.routes_BTLk[row, start : start + 5] == -1).all()
  row, start, _ = places(batch, 1)
  assert (batch.routes_BTLk[row, start : start + 7] >= 0).all()


def test_too_long_a_sequence():
  with pytest.raises(ValueError, match='33 tokens: rows hold 32'):
    pack([example(33)])


def test_no_examples():
  batch = pack([], rows=2)
  assert batch.tokens_BT.shape == (2, 32)
  assert (batch.segments_BT == -1).all()
  assert list(pack_lib.microbatches(batch, 2)) == []


def test_microbatches_are_the_batch_without_empty_ones():
  batch = pack([example(32, i) for i in range(5)], rows=8)
  parts = list(pack_lib.microbatches(batch, 2))
  assert [len(p.tokens_BT) for p in parts] == [2, 2, 2]
  for name in ('tokens_BT', 'segments_BT', 'weights_BT', 'routes_BTLk'):
    joined = np.concatenate([getattr(p, name) for p in parts])
    np.testing.assert_array_equal(joined, getattr(batch, name)[:6])
  (text,) = pack_lib.microbatches(pack([example(4, routes=False)]), 1)
  assert text.routes_BTLk is None


def trajectory():
  action = lambda start, end: types.Action('a', 'a', True, start, end)
  turns = (
      types.Turn(action(2, 4), 's', 0.0, 'o', 4, 6),
      types.Turn(action(6, 9), 's', 0.0, '', 9, 9),
  )
  sampled = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1], bool)
  return types.Trajectory(
      1, 't', 0, np.arange(9, dtype=np.int32), sampled,
      np.where(sampled, -1.5, 0).astype(np.float32),
      np.zeros((9, 2, 2), np.int16), 0, turns, types.Status.SUBMITTED, 1.0,
  )  # fmt: skip


def test_trained_on_is_what_was_sampled():
  """Case 14: token by token, with the advantage of its own action."""
  t = trajectory()
  e = pack_lib.from_trajectory(t, np.array([2.0, -3.0], np.float32))
  np.testing.assert_array_equal(e.weights > 0, t.sampled)
  assert e.advantages.tolist() == [0, 0, 2, 2, 0, 0, -3, -3, -3]
  batch = pack([e])
  np.testing.assert_array_equal(batch.weights_BT > 0, batch.sampled_BT)
  assert batch.weights_BT.sum() == t.sampled.sum() == 5
  np.testing.assert_array_equal(
      batch.targets_BT[batch.sampled_BT], [2, 3, 6, 7, 8]
  )


@pytest.mark.parametrize('count', [0, 1, 3])
def test_one_advantage_per_action(count):
  with pytest.raises(ValueError, match=f'{count} advantages for 2 actions'):
    pack_lib.from_trajectory(trajectory(), np.zeros(count, np.float32))
