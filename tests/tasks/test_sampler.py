"""The sampler never ends, is deterministic, and resumes at the next task."""

import collections
import json
import subprocess
import sys

import pytest

from agentic_rl.tasks import audit
from agentic_rl.tasks import generate
from agentic_rl.tasks import sampler
from agentic_rl.tasks import taskset


def _ids(tasks):
  return [t.task_id for t in tasks]


def test_fresh_tasks_never_repeat_and_follow_the_seed():
  draw = sampler.TaskSampler.create('fresh', seed=3)
  ids = [i for _ in range(10) for i in _ids(draw.next_batch(8))]
  assert len(set(ids)) == 80
  again = sampler.TaskSampler.create('fresh', seed=3)
  assert _ids(again.next_batch(80)) == ids
  other = sampler.TaskSampler.create('fresh', seed=4)
  assert not set(_ids(other.next_batch(80))) & set(ids)


def test_options_reach_the_generator():
  draw = sampler.TaskSampler.create(
      'fresh', split='heldout', difficulty=dict(modules=1, functions=[1, 1])
  )
  for task in draw.next_batch(10):
    assert task.meta['split'] == 'heldout'
    assert len(task.payload['files']) == 1
    assert generate.bucket(task.meta['keys'][0]) == 'heldout'


@pytest.mark.parametrize('name', ['fresh', 'fixed'])
def test_a_restored_sampler_goes_on_with_the_next_task(name):
  options = {'tasks': audit.build(10).tasks} if name == 'fixed' else {}
  draw = sampler.TaskSampler.create(name, seed=1, **options)
  draw.next_batch(7)
  state = json.loads(json.dumps(draw.state()))
  expected = _ids(draw.next_batch(25))
  fresh = sampler.TaskSampler.create(name, seed=1, **options)
  fresh.restore(state)
  assert _ids(fresh.next_batch(25)) == expected
  draw.restore(state)  # also backwards, in place
  assert _ids(draw.next_batch(25)) == expected


def test_a_fixed_set_goes_round_for_ever_in_new_orders():
  tasks = audit.build(10).tasks
  draw = sampler.TaskSampler.create('fixed', seed=0, tasks=tasks)
  passes = [_ids(draw.next_batch(10)) for _ in range(4)]
  for ids in passes:
    assert sorted(ids) == sorted(_ids(tasks))
  assert len(set(map(tuple, passes))) == 4
  counts = collections.Counter(_ids(draw.next_batch(25)))  # across passes
  assert set(counts.values()) <= {2, 3}


def test_a_fixed_set_is_read_from_its_folder(tmp_path):
  built = audit.build(4)
  taskset.save(tmp_path / 'set', built)
  draw = sampler.TaskSampler.create('fixed', tasks=str(tmp_path / 'set'))
  assert sorted(_ids(draw.next_batch(4))) == sorted(_ids(built.tasks))


def test_bad_inputs_are_named():
  create = sampler.TaskSampler.create
  with pytest.raises(ValueError, match="name is 'old'; allowed: .*fixed"):
    create('old')
  with pytest.raises(ValueError, match="split is 'dev'; allowed"):
    create('fresh', split='dev')
  with pytest.raises(ValueError, match='tasks are empty'):
    create('fixed', tasks=())
  draw = create('fresh')
  with pytest.raises(ValueError, match='count is 0; allowed: at least 1'):
    draw.next_batch(0)
  with pytest.raises(ValueError, match='state has key .* allowed: '):
    draw.restore(create('fresh', seed=1).state())
  with pytest.raises(ValueError, match='state has key None'):
    draw.restore({})


def test_tasks_are_imported_without_jax():
  modules = 'audit execute expert generate sampler taskset templates'
  names = ', '.join(f'agentic_rl.tasks.{m}' for m in modules.split())
  code = f'import sys, {names}; print("jax" in sys.modules)'
  done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, timeout=60
  )
  assert done.stdout == 'False\n', done.stderr
