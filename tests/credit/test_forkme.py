import numpy as np
import pytest

from agentic_rl.credit import forkme as forkme_lib
from tests.credit import samples


def test_by_hand():
  group = samples.group(
      samples.trajectory(['a', 'b'], 1.0),
      samples.broken(),
      samples.trajectory(['a'], 0.0),
  )
  advantages = forkme_lib.forkme(group, weight=2.0)
  np.testing.assert_array_equal(advantages[0], [1.0, 1.0])
  np.testing.assert_array_equal(advantages[1], [0.0])
  np.testing.assert_array_equal(advantages[2], [-1.0])


def test_uniform_group_and_bad_option():
  group = samples.group(*[samples.trajectory(['a'], 1.0)] * 2)
  assert not any(a.any() for a in forkme_lib.forkme(group))
  with pytest.raises(ValueError, match='weight'):
    forkme_lib.forkme(group, weight=-1.0)
