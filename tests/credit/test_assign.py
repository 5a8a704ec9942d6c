import numpy as np
import pytest

from agentic_rl import credit
from tests.credit import samples


def batch():
  return [
      samples.group(  # one of two solved, one broken
          samples.trajectory(['a'], 1.0),
          samples.trajectory(['a', 'b'], 0.0),
          samples.broken(['a']),
      ),
      samples.group(  # nothing solved
          samples.trajectory(['a'], 0.0), samples.trajectory(['a'], 0.0)
      ),
      samples.group(  # all solved, one without actions
          samples.trajectory(['a'], 1.0),
          samples.trajectory(['a'], 1.0),
          samples.trajectory([], 0.0),
      ),
      samples.group(samples.broken([])),  # no members
  ]


def test_stats_by_hand():
  advantages, stats = credit.assign(batch(), 'grpo', normalize_std=False)
  assert [len(a) for a in advantages] == [3, 2, 3, 1]
  # Actions of members: 0.5, -0.5, -0.5, then four zeros.
  values = np.array([0.5, -0.5, -0.5, 0, 0, 0, 0])
  assert stats == pytest.approx(
      {
          'zero_reward_share': 1 / 3,
          'all_solved_share': 1 / 3,
          'uniform_share': 2 / 3,
          'failed_count': 2,
          'no_action_count': 1,
          'empty_count': 1,
          'advantage_mean': values.mean(),
          'advantage_std': values.std(),
      }
  )


def test_solved_is_read_from_info_first():
  group = samples.group(
      samples.trajectory(['a'], 0.5, info={'solved': True}),
      samples.trajectory(['a'], 0.7, info={'solved': True}),
  )
  _, stats = credit.assign([group], 'action_td')
  assert stats['all_solved_share'] == 1.0
  assert stats['uniform_share'] == 0.0


def test_no_groups():
  advantages, stats = credit.assign([], 'action_td')
  assert advantages == [] and not any(stats.values())


def test_unknown_names_list_the_near_ones():
  with pytest.raises(ValueError, match=r"'gpro' \(near: grpo\); known: act"):
    credit.make('gpro')
  with pytest.raises(ValueError, match=r"'lamb' \(near: lam\)"):
    credit.make('action_td', lamb=0.3)
  with pytest.raises(ValueError, match='lam must be in'):
    credit.make('action_td', lam=2.0)


@pytest.mark.parametrize(
    'bad, message',
    [
        (lambda g: [], 'returned 0 arrays'),
        (lambda g: [np.zeros(1)], r'float64\[1\]'),
        (lambda g: [np.zeros(3, np.float32)], r'want float32\[1\]'),
        (lambda g: [np.full(1, np.nan, np.float32)], 'not finite'),
    ],
)
def test_estimators_are_held_to_their_contract(bad, message, monkeypatch):
  monkeypatch.setattr(credit, 'ESTIMATORS', {'mine': bad})
  with pytest.raises(ValueError, match=message):
    credit.assign([samples.group(samples.trajectory(['a'], 1.0))], 'mine')
