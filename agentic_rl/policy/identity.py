"""Weight identity: a hash of what weights hold, and what moving them cost.

After each publication the sampler must hold the learner's weights. The hash is
made of integer sums over the bits of every leaf, so it is the same number under
any sharding and on any mesh, and costs one pass over the weights.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def weights_hash(weights: Any) -> str:
  """Returns 16 hex digits that depend on every bit of the weights.

  t_i = mix(bits_i xor mix(i + seed));  hash = (Σ t_i, Σ mix(t_i + seed)), each
  modulo 2^32 and over the elements of all leaves, whose seeds depend on path,
  shape and dtype. `mix` is the finalizer of MurmurHash3, a bijection of 32-bit
  words, so one element that changes always changes the hash; other changes, as
  leaves or elements that change places, escape with a probability near 2^-64.

  Args:
    weights: tree of arrays of 1, 2 or 4 bytes an element, on any mesh.

  Raises:
    ValueError: if an element has another size.
  """
  named, seeds = {}, {}
  for path, leaf in jax.tree.leaves_with_path(weights):
    name = jax.tree_util.keystr(path)
    if leaf.dtype.itemsize not in _WORDS:
      raise ValueError(
          f'{name} of dtype {leaf.dtype}: elements of {sorted(_WORDS)} bytes are'
          ' allowed'
      )
    named[name] = leaf
    seeds[name] = _seed(f'{name} {leaf.shape} {leaf.dtype}')
  return ''.join(f'{x:08x}' for x in jax.device_get(_sums(named, seeds)))


def unequal_devices(weights: Any) -> int:
  """Returns how many devices hold other bits than the first with that part.

  The hash of weights that several devices hold is that of one copy; here every
  copy is read, on its device.

  Args:
    weights: as for `weights_hash`.
  """
  leaves = [x for x in jax.tree.leaves(weights) if _is_copied(x)]
  bad: set[int] = set()
  for mesh in {x.sharding.mesh for x in leaves}:
    own = [x for x in leaves if x.sharding.mesh == mesh]
    program = _sums_by_device(mesh, tuple(x.sharding.spec for x in own))
    sums_DL2 = jax.device_get(program(own))
    for leaf, sums_D2 in zip(own, sums_DL2.swapaxes(0, 1)):
      parts = leaf.sharding.devices_indices_map(leaf.shape)
      first: dict[str, bytes] = {}
      for device, sums in zip(mesh.devices.flat, sums_D2):
        found = sums.tobytes()
        if found != first.setdefault(str(parts[device]), found):
          bad.add(device.id)
  return len(bad)


def _is_copied(leaf: Any) -> bool:
  """Whether several devices of a mesh hold the same part."""
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, NamedSharding):
    return False
  parts = sharding.devices_indices_map(leaf.shape).values()
  return len(set(map(str, parts))) < len(parts)


@functools.lru_cache(maxsize=8)
def _sums_by_device(mesh, specs):
  """Returns a program: leaves -> uint32 [devices, leaves, 2]."""

  def own(leaves):
    return jnp.stack([jnp.stack(_sums_of(x, np.uint32(0))) for x in leaves])[
        None
    ]

  return jax.jit(
      jax.shard_map(
          own,
          mesh=mesh,
          in_specs=(list(specs),),
          out_specs=PartitionSpec(mesh.axis_names),
          check_vma=False,
      )
  )


def bytes_moved(source: Any, copies: Sequence[Any]) -> int:
  """Returns the bytes of buffers that hold a copy and are not the source's.

  Every shard is looked at: one that is the very same memory of the same device
  as a shard of the source was not moved. Buffers that several copies share
  count once.

  Args:
    source: tree of arrays, the learner's weights.
    copies: trees of the same structure, what the sampler's engines hold.
  """
  moved: dict[tuple[int, int], int] = {}
  own = [_buffers(leaf) for leaf in jax.tree.leaves(source)]
  for copy in copies:
    for have, leaf in zip(own, jax.tree.leaves(copy), strict=True):
      moved |= {k: n for k, n in _buffers(leaf).items() if k not in have}
  return sum(moved.values())


def _buffers(leaf: jax.Array) -> dict[tuple[int, int], int]:
  """Returns {(device, address): bytes} of the shards on this host."""
  return {
      (s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes
      for s in leaf.addressable_shards
  }


def _seed(name: str) -> np.uint32:
  digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
  return np.uint32(int.from_bytes(digest, 'little'))


@jax.jit
def _sums(leaves, seeds) -> tuple[jax.Array, jax.Array]:
  """Returns both sums over all leaves, uint32."""
  parts = [_sums_of(leaf, seeds[name]) for name, leaf in leaves.items()]
  return tuple(functools.reduce(jnp.add, sums) for sums in zip(*parts))


def _sums_of(leaf, seed):
  words = lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize])
  words = words.astype(jnp.uint32)
  terms = _mix(words ^ _mix(_places(words.shape) + seed))
  return terms.sum(dtype=jnp.uint32), _mix(terms + seed).sum(dtype=jnp.uint32)


def _places(shape: tuple[int, ...]) -> jax.Array:
  """Returns uint32 of this shape: the index of each element, modulo 2^32."""
  place, stride = jnp.zeros(shape, jnp.uint32), 1
  for axis in reversed(range(len(shape))):
    steps = lax.broadcasted_iota(jnp.uint32, shape, axis)
    place += steps * np.uint32(stride % (1 << 32))
    stride *= shape[axis]
  return place


def _mix(x):
  """Finalizer of MurmurHash3."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
