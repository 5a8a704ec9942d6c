"""One seed, one result, whatever the schedule; another seed, another one."""

import pytest

from tests.smoke import runs


def test_workers_and_slots_change_nothing(tmp_path):
  base, _ = runs.base()
  values = {'env_pool.workers': 1, 'rollout.max_sequences': 5}
  values |= {'rollout.engines': 1}
  done = runs.run(tmp_path / 'run', values)
  assert done.code == 0, done.errors
  runs.assert_same_result(tmp_path / 'run', base)


@pytest.mark.slow
def test_another_seed_is_another_run(tmp_path):
  base, _ = runs.base()
  values = {'seed': 1, 'warm_start.steps': 0, 'learner.iterations': 1}
  done = runs.run(tmp_path / 'run', values)
  assert done.code == 0, done.errors
  got, want = runs.summary(tmp_path / 'run'), runs.summary(base)
  assert got['params_sha256'] != want['params_sha256']
  assert got['unequal_logprob_bits'] == 0
