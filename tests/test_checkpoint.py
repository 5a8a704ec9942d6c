import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl import checkpoint


def make_tree(seed=0, width=64):
  w = jax.random.normal(jax.random.key(seed), (4, width, width))
  return {
      'params': {'w': w, 'b': w[0].astype(jnp.bfloat16)},
      'opt': (w * 0.5, {'count': jnp.int32(seed), 'none': None}),
      'key': jax.random.key(seed),
      'empty': jnp.zeros((0, 3)),
      'host': np.arange(5, dtype=np.int64) + seed,
  }


def saved(folder, steps=(1, 2, 3)):
  """A closed folder of checkpoints; step s holds make_tree(s)."""
  with checkpoint.Checkpointer(folder, keep=len(steps)) as checkpointer:
    for step in steps:
      assert checkpointer.save(step, make_tree(step), {'step': step})
  return pathlib.Path(folder)


def restore(folder, like=None):
  warnings = []
  with checkpoint.Checkpointer(folder, warn=warnings.append) as checkpointer:
    got = checkpointer.restore_latest(make_tree() if like is None else like)
  return got, warnings


def check_step(got, step):
  assert got[0] == step and got[2] == {'step': step}
  want = make_tree(step)
  assert jax.tree.structure(got[1]) == jax.tree.structure(want)
  assert checkpoint.params_sha256(got[1]) == checkpoint.params_sha256(want)


def test_restores_the_bits_and_keeps_the_newest(tmp_path):
  state = {'step': 4, 'rng': [1, 2**40], 'nested': {'a': None, 'b': 0.1}}
  with checkpoint.Checkpointer(tmp_path / 'c', keep=2) as checkpointer:
    assert checkpointer.restore_latest(make_tree()) is None
    for step in (1, 2, 3, 4):
      assert checkpointer.save(step, make_tree(step), state)
    assert not checkpointer.save(4, make_tree(4), state)  # already there
    checkpointer.wait()
    assert checkpointer.steps() == [3, 4]
  abstract = jax.eval_shape(lambda: {**make_tree(), 'host': None})
  abstract['host'] = np.zeros(5, np.int64)
  (step, tree, got_state), warnings = restore(tmp_path / 'c', abstract)
  assert (step, got_state, warnings) == (4, state, [])
  want = make_tree(4)
  for got, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(want)):
    assert got.dtype == leaf.dtype and got.shape == leaf.shape
  assert checkpoint.params_sha256(tree) == checkpoint.params_sha256(want)
  assert isinstance(tree['host'], np.ndarray)


def test_donating_the_tree_after_save_does_not_change_what_is_written(tmp_path):
  update = jax.jit(lambda x: x + 1, donate_argnums=0)
  tree = {'w': jnp.arange(2_000_000, dtype=jnp.float32)}
  want = checkpoint.params_sha256(tree)
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(0, tree, {})
    for _ in range(3):
      tree = {'w': update(tree['w'])}
    jax.block_until_ready(tree)
    got = checkpointer.restore_latest(tree)
  assert checkpoint.params_sha256(got[1]) == want


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def truncate(path):
  os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize('damage', [flip, truncate, pathlib.Path.unlink])
@pytest.mark.parametrize('which', ['largest', 'meta', 'tree_metadata'])
def test_corrupt_checkpoint_falls_back_to_the_previous(tmp_path, damage, which):
  folder = saved(tmp_path)
  files = [p for p in (folder / '3').rglob('*') if p.is_file()]
  if which == 'largest':
    path = max(files, key=lambda p: p.stat().st_size)
  elif which == 'meta':
    path = folder / '3' / 'meta' / 'metadata'
  else:
    path = folder / '3' / 'tree' / '_METADATA'
  damage(path)
  got, warnings = restore(folder)
  if got[0] == 3:  # a change of a file that does not matter
    assert which == 'tree_metadata'
    check_step(got, 3)
    return
  check_step(got, 2)
  assert len(warnings) == 1 and 'CORRUPT CHECKPOINT: step 3' in warnings[0]
  assert (folder / 'corrupt.3').is_dir()
  # The run continues and saves step 3 anew.
  with checkpoint.Checkpointer(folder) as checkpointer:
    assert checkpointer.save(3, make_tree(3), {'step': 3})
  got, warnings = restore(folder)
  check_step(got, 3)
  assert not warnings


def test_all_corrupt_is_one_error_that_names_them(tmp_path):
  folder = saved(tmp_path, steps=(1, 2))
  for step in '12':
    flip(folder / step / 'meta' / 'metadata')
  with pytest.raises(checkpoint.CheckpointError) as error:
    restore(folder)
  assert 'every checkpoint in' in str(error.value)
  assert 'step 2' in str(error.value) and 'step 1' in str(error.value)
  assert (folder / '2').is_dir()  # nothing is moved


def test_another_shape_is_an_error_not_corruption(tmp_path):
  folder = saved(tmp_path, steps=(1,))
  with pytest.raises(checkpoint.MismatchError) as error:
    restore(folder, make_tree(width=32))
  assert 'params.w: float32[4, 64, 64] saved, float32[4, 32, 32] wanted' in str(
      error.value
  )
  with pytest.raises(checkpoint.MismatchError, match='extra: absent saved'):
    restore(folder, {**make_tree(), 'extra': jnp.zeros(2)})
  assert (folder / '1').is_dir()


_WRITER = """
import sys
import jax.numpy as jnp
from agentic_rl import checkpoint
writer = checkpoint.Checkpointer(sys.argv[1], keep=2)
for step in range(10_000):
  tree = {'w': jnp.full(2_000_000, step, jnp.float32)}
  writer.save(step, tree, {'step': step})
  print(step, flush=True)
"""


def test_kill_at_any_moment_leaves_the_newest_complete_one(tmp_path):
  rng = np.random.default_rng(0)
  for trial in range(2):
    folder = tmp_path / str(trial)
    child = subprocess.Popen(
        [sys.executable, '-c', _WRITER, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    )
    for _ in range(4):
      line = child.stdout.readline()
    time.sleep(float(rng.uniform(0, 0.1)))
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    started = int(rest[-1] if rest else line)
    like = {'w': jnp.zeros(2_000_000)}
    (step, tree, state), warnings = restore(folder, like)
    # The save before the last one that returned was complete.
    assert started - 1 <= step <= started + 1 and not warnings
    assert state == {'step': step}
    np.testing.assert_array_equal(tree['w'], np.float32(step))
    deadline = time.monotonic() + 30  # halves are removed in the background
    while list(folder.glob('*tmp*')) and time.monotonic() < deadline:
      time.sleep(0.05)
    assert not list(folder.glob('*tmp*'))


def test_full_disk_is_one_clear_error(tmp_path, monkeypatch):
  checkpointer = checkpoint.Checkpointer(tmp_path)
  checkpointer.save(1, make_tree(1), {'step': 1})
  checkpointer.wait()
  usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=1000)
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.shutil, 'disk_usage', lambda _: usage)
    with pytest.raises(checkpoint.CheckpointError) as error:
      checkpointer.save(2, make_tree(2), {})
  assert 'the disk is full' in str(error.value)
  assert 'Newest complete checkpoint: step 1' in str(error.value)
  checkpointer.close()


def test_failed_write_is_reported_once_and_leaves_the_last_good_one(tmp_path):
  checkpointer = checkpoint.Checkpointer(tmp_path)
  checkpointer.save(1, make_tree(1), {'step': 1})
  checkpointer.wait()
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
  try:
    with pytest.raises(checkpoint.CheckpointError, match='cannot write'):
      checkpointer.save(2, make_tree(2), {'step': 2})
      checkpointer.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
  checkpointer.close()
  got, _ = restore(tmp_path)
  check_step(got, 1)


def test_bad_input(tmp_path):
  with checkpoint.Checkpointer(tmp_path / 'a') as checkpointer:
    with pytest.raises(TypeError, match='the state is not JSON'):
      checkpointer.save(0, make_tree(), {'x': b'bytes'})
    with pytest.raises(TypeError, match="leaf 'n' is int, not an array"):
      checkpointer.save(0, {'n': 1}, {})
  (tmp_path / 'file').write_text('')
  with pytest.raises(checkpoint.CheckpointError, match='cannot keep'):
    checkpoint.Checkpointer(tmp_path / 'file')
  with pytest.raises(ValueError, match='keep must be'):
    checkpoint.Checkpointer(tmp_path / 'b', keep=0)


def test_sha256_depends_on_bits_paths_types_and_shapes():
  base = {'a': jnp.zeros((2, 3)), 'b': jnp.ones(2)}
  sha256 = checkpoint.params_sha256
  assert sha256(base) == sha256(
      {'b': np.ones(2, 'f4'), 'a': np.zeros((2, 3), 'f4')}
  )
  others = [
      {**base, 'a': jnp.zeros((3, 2))},
      {**base, 'a': jnp.zeros((2, 3), jnp.int32)},
      {**base, 'a': -jnp.zeros((2, 3))},
      {'a': base['a'], 'c': base['b']},
      {'a': base['a']},
  ]
  assert len({sha256(t) for t in [base, *others]}) == 1 + len(others)
