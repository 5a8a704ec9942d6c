import hashlib
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from agentic_rl.policy import identity

MASK = (1 << 32) - 1


def mix(x):
  x = (x ^ (x >> 16)) * 0x85EBCA6B & MASK
  x = (x ^ (x >> 13)) * 0xC2B2AE35 & MASK
  return x ^ (x >> 16)


def by_hand(tree):
  """The hash with Python's integers, one element after the other."""
  first = second = 0
  for path, leaf in jax.tree.leaves_with_path(tree):
    name = f'{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}'
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, 'little')
    bits = np.asarray(leaf).reshape(-1).view(f'u{leaf.dtype.itemsize}')
    for i, word in enumerate(bits.tolist()):
      term = mix(word ^ mix((i + seed) & MASK))
      first, second = first + term, second + mix((term + seed) & MASK)
  return f'{first & MASK:08x}{second & MASK:08x}'


def tree():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {
      'a': draw(3, 4),
      'b': [draw(5).astype(jnp.bfloat16), draw(3, 4)],
      'c': draw(2, 3, 2).astype(jnp.float8_e4m3fn),
      'one': draw(),
      'none': draw(0, 4),
  }


def test_the_hash_by_hand():
  weights = tree()
  assert identity.weights_hash(weights) == by_hand(weights)
  assert identity.weights_hash(jax.tree.map(np.array, weights)) == by_hand(
      weights
  )


@pytest.mark.parametrize(
    'dtype', [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn]
)
def test_every_single_bit_counts(dtype):
  value = np.asarray(jnp.arange(1.0, 7.0).reshape(2, 3).astype(dtype))
  unsigned = np.dtype(f'u{value.itemsize}')
  seen = {identity.weights_hash({'w': value})}
  for place in range(6):
    for bit in range(8 * value.itemsize):
      other = value.copy()
      other.reshape(-1).view(unsigned)[place] ^= unsigned.type(1 << bit)
      seen.add(identity.weights_hash({'w': other}))
  assert len(seen) == 1 + 6 * 8 * value.itemsize


def test_places_count():
  """Elements, rows or leaves that change places; other names and shapes."""
  a = np.arange(12, dtype=np.float32).reshape(3, 4)
  b = a + 100
  variants = [
      {'a': a, 'b': b},
      {'a': b, 'b': a},
      {'a': a[::-1].copy(), 'b': b},
      {'a': a[:, ::-1].copy(), 'b': b},
      {'a': a, 'c': b},
      {'a': a.reshape(4, 3), 'b': b},
      {'a': a.view(np.int32), 'b': b},
      {'a': a},
  ]
  for i in range(12):
    for j in range(i):
      swapped = a.copy().reshape(-1)
      swapped[[i, j]] = swapped[[j, i]]
      variants.append({'a': swapped.reshape(3, 4), 'b': b})
  hashes = [identity.weights_hash(v) for v in variants]
  assert len(set(hashes)) == len(variants)
  zeros = {'a': np.zeros(3, np.float32)}
  assert identity.weights_hash(zeros) != identity.weights_hash(
      {'a': -zeros['a']}
  )


def test_elements_of_eight_bytes_are_an_error():
  with pytest.raises(ValueError, match=r"\['a'\] of dtype int64: .*1, 2, 4"):
    identity.weights_hash({'a': np.zeros(2, np.int64)})


def test_bytes_moved():
  weights = {'a': jnp.ones((8, 4)), 'b': jnp.ones(6, jnp.bfloat16)}
  same = dict(weights)
  assert identity.bytes_moved(weights, [weights, same]) == 0
  part = {'a': weights['a'], 'b': weights['b'].copy()}
  assert identity.bytes_moved(weights, [part]) == 12
  # What two engines share was moved once.
  assert identity.bytes_moved(weights, [part, weights, dict(part)]) == 12
  other = {'a': weights['a'].copy(), 'b': weights['b'].copy()}
  assert identity.bytes_moved(weights, [part, other]) == 12 + 128 + 12


SHARDED = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from agentic_rl.policy import identity
assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ('x', 'y'))
rng = np.random.default_rng(0)
host = {'a': rng.normal(size=(8, 16)).astype(np.float32),
        'b': rng.normal(size=(4, 8, 3)).astype(np.float32)}
want = identity.weights_hash(jax.tree.map(jax.numpy.asarray, host))
made = {}
for spec in (P(), P('x'), P('y'), P(None, ('x', 'y')), P('x', 'y'), P('y', 'x')):
  made[spec] = jax.device_put(host, NamedSharding(mesh, spec))
  assert identity.weights_hash(made[spec]) == want, spec
size = sum(x.nbytes for x in host.values())
rows = made[P('x', 'y')]
assert identity.bytes_moved(rows, [rows]) == 0
assert identity.bytes_moved(rows, [made[P()]]) == 8 * size
mixed = {'a': rows['a'], 'b': made[P('y', 'x')]['b']}
assert identity.bytes_moved(rows, [mixed]) == host['b'].nbytes
print('equal', want)
"""


def test_the_hash_is_free_of_the_mesh():
  """A process of its own: host devices are counted once, at the start."""
  root = pathlib.Path(__file__).resolve().parents[2]
  done = subprocess.run(
      [sys.executable, '-c', SHARDED],
      env={
          **os.environ,
          'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
          'JAX_PLATFORMS': 'cpu',
      },
      cwd=root,
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith('equal ')


@pytest.mark.parametrize('cut', [None, 'x'])
def test_a_bit_of_one_copy_is_seen(cut):
  """Devices that hold the same part; the hash is that of the first."""
  mesh = jax.make_mesh((2, 4), ('x', 'y'))
  value = np.arange(24, dtype=np.float32).reshape(6, 4)
  wrong = value.copy()
  wrong[3:4, 2].view(np.int32)[0] ^= 1
  sharding = NamedSharding(mesh, PartitionSpec(cut))
  parts = sharding.devices_indices_map(value.shape)
  for bad in ([], [5], [4, 6]):
    shards = [
        jax.device_put((wrong if d.id in bad else value)[parts[d]], d)
        for d in mesh.devices.flat
    ]
    leaf = jax.make_array_from_single_device_arrays(
        value.shape, sharding, shards
    )
    weights = {'a': jnp.ones(3), 'b': leaf}
    # Device 4 is the first with the second half: the three others differ, and
    # 6 does not.
    want = {'': 0, '5': 1, '46': 2}[''.join(map(str, bad))]
    assert identity.unequal_devices(weights) == want
  whole = jax.device_put(value, NamedSharding(mesh, PartitionSpec(('x',), 'y')))
  assert identity.unequal_devices({'a': whole, 'b': value}) == 0
