"""Meshes: which device holds what, and how data moves in the forward.

A mesh has four axes. `data`, `fsdp` and `expert` cut the rows of a batch among
devices; `fsdp` also cuts the weights, which are gathered a layer at a time
(Source: arXiv:1910.02054 §5.3), `expert` the experts, to which tokens travel
and from which they return (Source: arXiv:2006.16668 §3.2). `context` cuts the
tokens of a row: keys and values are gathered, or the window's part of them.

Nothing is summed across devices in the forward, only moved: a row's value is
what one device would have computed, to the last bit. Programs run under
`jax.shard_map`, so that no compiler can choose otherwise; gradients are summed
across devices after the backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

AXES = ('data', 'fsdp', 'expert', 'context')
ROW_AXES = ('data', 'fsdp', 'expert')
MOST_HOST_DEVICES = 256  # that a CPU is shown as; `make` refuses more


@dataclasses.dataclass(frozen=True)
class ShardingRules:
  """The mesh axis that cuts each logical axis of a weight; None: whole.

  Columns of a product may be cut, its rows never: that would need a sum across
  devices. A cut axis is gathered before use, but for `expert`.
  """

  layers: str | None = None
  vocab: str | None = None
  embed: str | None = 'fsdp'
  heads: str | None = None
  kv_heads: str | None = None
  mlp: str | None = None
  expert: str | None = 'expert'
  expert_mlp: str | None = None

  def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns how an array with these logical axes is cut."""
    return PartitionSpec(*(a and getattr(self, a) for a in axes))


@dataclasses.dataclass(frozen=True)
class Parallel:
  """A mesh and the rules; static in every program.

  Attributes:
    mesh: the devices, or None for the default device alone.
    rules: from logical to mesh axes.
  """

  mesh: Mesh | None = None
  rules: ShardingRules = ShardingRules()

  def size(self, *names: str) -> int:
    """Returns the number of devices along these axes, of all if none."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[n] for n in names or AXES)

  # --- where arrays live ---

  def sharding(self, axes: tuple[str | None, ...]):
    """Returns the sharding of an array with these logical axes, or None."""
    return self.mesh and NamedSharding(self.mesh, self.rules.spec(axes))

  def shardings(self, logical: Any) -> Any:
    """Returns the shardings of a tree of logical axes; None without a mesh."""
    if self.mesh is None:
      return None
    return jax.tree.map(self.sharding, logical, is_leaf=_is_axes)

  def specs(self, logical: Any) -> Any:
    """Returns the partition specs of a tree of logical axes."""
    return jax.tree.map(self.rules.spec, logical, is_leaf=_is_axes)

  def replicated(self):
    """Returns the sharding of what every device holds; None without a mesh."""
    return self.mesh and NamedSharding(self.mesh, PartitionSpec())

  def by_device(self):
    """Returns the sharding of an array whose first axis is the devices."""
    return self.mesh and NamedSharding(self.mesh, PartitionSpec(AXES))

  # --- programs ---

  def map(self, fun, in_specs, out_specs):
    """Returns `fun` run by every device on its part; `fun` without a mesh.

    Args:
      fun: what a device does.
      in_specs: a tree of specs for each argument; see `by_device`.
      out_specs: for the results.
    """
    if self.mesh is None:
      return fun
    return jax.shard_map(
        fun,
        mesh=self.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )

  # --- inside programs: movement ---

  def gather(self, weights: Any, logical: Any) -> Any:
    """Returns whole weights, but for the experts' axis, which stays cut.

    Args:
      weights: a tree of this device's parts.
      logical: the tree of their logical axes.
    """
    if self.mesh is None:
      return weights

    def leaf(axes, part):
      for place, axis in enumerate(axes):
        cut = axis and axis != 'expert' and getattr(self.rules, axis)
        if cut and self.size(cut) > 1:
          part = lax.all_gather(part, cut, axis=place, tiled=True)
      return part

    return jax.tree.map(leaf, logical, weights, is_leaf=_is_axes)

  @property
  def expert_devices(self) -> int:
    """Devices that share the experts."""
    return self.size(self.rules.expert) if self.rules.expert else 1

  def exchange(self, x):
    """Sends x[i] to the i-th of `expert_devices`; y[i] came from it."""
    return lax.all_to_all(x, self.rules.expert, 0, 0, tiled=True)

  def part(self):
    """Returns which part of its rows this device holds."""
    return lax.axis_index('context') if self.size('context') > 1 else 0

  def past(self, x_BT, past: int):
    """Puts what precedes this device's part of each row before it.

    Args:
      x_BT: [B, T, ...], this device's part of the rows.
      past: places wanted, at most those of the other parts.

    Returns:
      [B, past + T, ...]; before a row's beginning stands its end.
    """
    length, parts = x_BT.shape[1], self.size('context')
    if past == (parts - 1) * length:  # all there is
      every = lax.all_gather(x_BT, 'context')  # [parts, B, T, ...]
      order = (jnp.arange(parts) + self.part() + 1) % parts
      whole = jnp.moveaxis(every[order], 0, 1)
      return whole.reshape(x_BT.shape[0], -1, *x_BT.shape[2:])
    pieces = [x_BT]
    for hop in range(1, -(-past // length) + 1):
      wanted = min(length, past - (hop - 1) * length)
      ring = [(i, (i + hop) % parts) for i in range(parts)]
      piece = lax.ppermute(x_BT[:, length - wanted :], 'context', ring)
      pieces.insert(0, piece)
    return jnp.concatenate(pieces, 1)

  # --- inside programs: sums, never in the forward ---

  def sum_gradients(self, grads: Any, logical: Any) -> Any:
    """Adds up the gradients of weights that several devices hold.

    Gathered axes are summed by the gather's transpose already.
    """
    if self.mesh is None:
      return grads

    def leaf(axes, g):
      own = {cut for cut in self.rules.spec(axes) if cut}
      rest = tuple(a for a in AXES if a not in own and self.size(a) > 1)
      return lax.psum(g, rest) if rest else g

    return jax.tree.map(leaf, logical, grads, is_leaf=_is_axes)

  def sum(self, x, *names: str):
    """Adds up a tree over the devices along these axes, over all if none."""
    return x if self.mesh is None else lax.psum(x, names or AXES)

  def max(self, x):
    """Takes the maximum of a tree over all devices; of a NaN it is infinite."""
    if self.mesh is None:
      return x
    # A maximum over CPU devices would lose a NaN.
    known = jax.tree.map(lambda a: jnp.where(jnp.isnan(a), jnp.inf, a), x)
    return lax.pmax(known, AXES)


SINGLE = Parallel()


def parse(text: str) -> dict[str, int]:
  """Reads 'data=2,fsdp=2,expert=2'; axes that are not named have size 1.

  Raises:
    ValueError: on an unknown or repeated axis, or a size below 1.
  """
  sizes: dict[str, int] = {}
  for part in filter(None, text.replace(' ', '').split(',')):
    name, equals, size = part.partition('=')
    if name not in AXES or not equals or name in sizes:
      raise ValueError(
          f'mesh={text!r}: {part!r} is not allowed; each of {list(AXES)} may be'
          " given once, as in 'data=2,fsdp=2'"
      )
    if not size.isdecimal() or int(size) < 1:
      raise ValueError(
          f'mesh={text!r}: {name} must be a number of devices, not {size!r}'
      )
    sizes[name] = int(size)
  return {name: sizes.get(name, 1) for name in AXES}


def make(
    text: str,
    rules: ShardingRules = ShardingRules(),
    devices: list[Any] | None = None,
) -> Parallel:
  """Returns the mesh that a text describes.

  Args:
    text: as for `parse`; with one device or none named, no mesh is made.
    rules: from logical to mesh axes.
    devices: to use, in order; None for as many of all as are needed.

  Raises:
    ValueError: if there are too few devices.
  """
  sizes = parse(text)
  count = math.prod(sizes.values())
  if count == 1:
    return Parallel(None, rules)
  if devices is None:
    devices = jax.devices()[:count]
  if len(devices) != count:
    raise ValueError(
        f'mesh={text!r} needs {count} devices: there are {len(devices)}'
        f' ({jax.default_backend()})'
    )
  mesh = jax.make_mesh(
      tuple(sizes.values()),
      AXES,
      axis_types=(AxisType.Auto,) * len(AXES),
      devices=devices,
  )
  return Parallel(mesh, rules)


def host_devices(*texts: str) -> None:
  """Makes the CPU show as many devices as the largest of these meshes needs.

  To be called before JAX is used; does nothing where there is an accelerator.

  Raises:
    ValueError: if JAX runs on too few CPU devices already.
  """
  counts = {text: math.prod(parse(text).values()) for text in texts}
  text = max(counts, key=counts.__getitem__)
  count = counts[text]
  if count == 1:
    return
  # The host's devices share its threads: programs in flight at the same time
  # would wait for each other for ever.
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  try:
    jax.config.update('jax_num_cpu_devices', min(count, MOST_HOST_DEVICES))
  except RuntimeError as error:
    if jax.default_backend() == 'cpu' and len(jax.devices()) < count:
      raise ValueError(
          f'mesh={text!r} needs {count} devices: this process runs on'
          f' {len(jax.devices())} already'
      ) from error


def check(parallel: Parallel, shapes: Any, logical: Any) -> None:
  """Checks that a mesh can cut these weights.

  Raises:
    ValueError: names the weight, its axis, its size and the mesh.
  """
  flat, tree = jax.tree.flatten_with_path(logical, is_leaf=_is_axes)
  for (path, axes), leaf in zip(flat, tree.flatten_up_to(shapes)):
    for size, axis in zip(leaf.shape, axes):
      cut = axis and getattr(parallel.rules, axis)
      if cut and size % parallel.size(cut):
        raise ValueError(
            f'mesh: {cut}={parallel.size(cut)} can not cut the axis {axis!r} of'
            f' {jax.tree_util.keystr(path)}, which has {size}; it must be a'
            ' multiple'
        )


def _is_axes(x) -> bool:
  return isinstance(x, tuple)
