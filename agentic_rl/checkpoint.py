"""Checkpoints: arrays and JSON state, asynchronous, atomic, verified.

A checkpoint is `<folder>/<step>/` in Orbax's format: `tree` holds the arrays
under their key paths, `meta` the JSON state and a digest of every array. A
step folder gets its name only when it is complete, so that a kill at any
moment leaves the last complete one as the newest. Orbax copies the arrays
before `save` returns and writes them in the background.

What is read is checked against the digests: a truncated or altered file is
never trained on. The next older checkpoint is taken instead, loudly, and the
bad one is kept aside as `corrupt.<step>`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pathlib
import shutil
from typing import Any, Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

_FORMAT = 1
_ASIDE = 'corrupt.'


class CheckpointError(Exception):
  """A checkpoint can not be written or read, told in one message."""


class MismatchError(CheckpointError):
  """The checkpoint is sound, but holds other arrays than were asked for."""


class Checkpointer:
  """Saves and restores the state of a run.

  Attributes:
    folder: where the step folders lie.
  """

  def __init__(
      self,
      folder: str | os.PathLike,
      *,
      keep: int = 3,
      warn: Callable[[str], None] = logging.getLogger(__name__).warning,
      read_only: bool = False,
  ):
    """Opens a folder and removes what a killed run left half written.

    Args:
      folder: made if it is missing.
      keep: number of newest checkpoints to keep, >= 1; 2 or more leave one to
        fall back on.
      warn: told when a checkpoint is corrupt and an older one is used.
      read_only: the folder belongs to another run: nothing is made, removed or
        written there.

    Raises:
      CheckpointError: the folder can not be made.
      ValueError: `keep` is not positive.
    """
    if keep < 1:
      raise ValueError(f'keep must be at least 1, not {keep}')
    self.folder = pathlib.Path(folder).absolute()
    self._warn = warn
    self._failed = False
    _quiet_orbax()
    try:
      if not read_only:
        self.folder.mkdir(parents=True, exist_ok=True)
      self._manager = ocp.CheckpointManager(
          self.folder,
          options=ocp.CheckpointManagerOptions(
              max_to_keep=keep,
              create=not read_only,
              cleanup_tmp_directories=not read_only,
              enable_async_checkpointing=not read_only,
              read_only=read_only,
          ),
          item_names=('tree', 'meta'),
          item_handlers={
              # Random floats do not compress; trying costs a core.
              'tree': ocp.PyTreeCheckpointHandler(use_compression=False),
              'meta': ocp.JsonCheckpointHandler(),
          },
      )
    except OSError as error:
      raise CheckpointError(
          f'cannot keep checkpoints in {self.folder}: {error}'
      ) from None

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, tree: Any, json_state: Mapping[str, Any]) -> bool:
    """Starts to write a checkpoint; returns when `tree` may be reused.

    Waits for the previous save first, and reports its failure if it failed.

    Args:
      step: number of the checkpoint, >= 0.
      tree: any pytree of JAX or NumPy arrays.
      json_state: counters, sampler state, seeds: JSON values only.

    Returns:
      False if the step was already saved (nothing is written), else True.

    Raises:
      CheckpointError: the disk is full, or the write failed.
      TypeError: a leaf is not an array, or a state is not JSON.
    """
    meta = {'format': _FORMAT, 'step': int(step), 'state': json_state}
    meta['leaves'] = {k: _describe(v) for k, v in _flat(tree).items()}
    meta['sha256'] = _json_sha256(meta)
    self.wait()
    if step in self.steps():
      return False
    self._check_space(tree)
    try:
      return self._manager.save(
          step,
          args=ocp.args.Composite(
              tree=ocp.args.PyTreeSave(_storable(_flat(tree))),
              meta=ocp.args.JsonSave(meta),
          ),
      )
    except Exception as error:
      raise self._write_error(error) from error

  def restore_latest(
      self, abstract_tree: Any
  ) -> tuple[int, Any, dict[str, Any]] | None:
    """Restores the newest checkpoint whose digests hold.

    Args:
      abstract_tree: the tree to restore into: arrays, or ShapeDtypeStructs
        with shardings. Types, shapes and key paths must be those saved.

    Returns:
      (step, tree, json_state), the arrays with the saved bits; None if there
      is no checkpoint.

    Raises:
      MismatchError: the newest sound checkpoint holds other arrays.
      CheckpointError: there are checkpoints, but all are corrupt.
    """
    self.wait()
    bad: list[tuple[int, str]] = []
    for step in reversed(self.steps()):
      try:
        tree, state = self._restore(step, abstract_tree)
      except MismatchError:
        raise
      except Exception as error:
        bad.append((step, _first_line(error)))
        continue
      for bad_step, reason in bad:
        aside = self._set_aside(bad_step)
        self._warn(
            f'CORRUPT CHECKPOINT: step {bad_step} in {self.folder} ({reason});'
            f' continuing from step {step}. It is kept as {aside}.'
        )
      return step, tree, state
    if bad:
      lines = ''.join(f'\n  step {s}: {reason}' for s, reason in bad)
      raise CheckpointError(
          f'every checkpoint in {self.folder} is corrupt:{lines}\n'
          'Remove the folder to start again.'
      )
    return None

  def wait(self) -> None:
    """Waits until the last save is on the disk.

    Raises:
      CheckpointError: it failed.
    """
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except Exception as error:
      raise self._write_error(error) from error

  def close(self) -> None:
    """Waits, and frees the threads. A failure is reported only once.

    Raises:
      CheckpointError: the last save failed.
    """
    try:
      self._manager.close()
    except Exception as error:
      if not self._failed:
        raise self._write_error(error) from error

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _restore(self, step: int, abstract_tree: Any, part: str = ''):
    """Returns (tree, state) of one step; any exception means corrupt.

    Args:
      step: of the checkpoint.
      abstract_tree: see `restore_latest`.
      part: only leaves whose key path begins so are looked at.
    """
    meta = self._manager.restore(
        step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
    ).meta
    sha256 = meta.pop('sha256', None)
    if sha256 != _json_sha256(meta):
      raise CheckpointError(f'{self.folder / str(step) / "meta"} was altered')
    like = _flat(abstract_tree)
    leaves = {k: v for k, v in meta['leaves'].items() if k.startswith(part)}
    _check_match(step, leaves, like)
    wanted = _wanted(like)
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(
        wanted, restore_args=restore_args, partial_restore=bool(part)
    )
    flat = self._manager.restore(step, args=ocp.args.Composite(tree=args)).tree
    flat = _rebuilt(flat, like)
    for key, saved in leaves.items():
      if saved != _describe(flat[key]):
        raise CheckpointError(
            f'array {key} in {self.folder / str(step) / "tree"} was altered'
        )
    treedef = jax.tree.structure(abstract_tree)
    return jax.tree.unflatten(treedef, flat.values()), meta['state']

  def _set_aside(self, step: int) -> str:
    source = self.folder / str(step)
    target = self.folder / f'{_ASIDE}{step}'
    shutil.rmtree(target, ignore_errors=True)
    source.rename(target)
    self._manager.reload()
    return target.name

  def _check_space(self, tree: Any) -> None:
    """Fails before anything is written when the disk is surely too full."""
    need_bytes = sum(x.nbytes for x in jax.tree.leaves(tree))
    free_bytes = shutil.disk_usage(self.folder).free
    if free_bytes < need_bytes:
      raise self._write_error(
          OSError(
              errno.ENOSPC,
              f'{need_bytes / 1e6:.0f} MB needed, {free_bytes / 1e6:.0f} free',
          )
      )

  def _write_error(self, error: BaseException) -> CheckpointError:
    """Returns one message for a failed write, and frees what it occupied."""
    self._failed = True
    for path in self.folder.glob('*.orbax-checkpoint-tmp*'):
      shutil.rmtree(path, ignore_errors=True)
    reason = _first_line(error)
    text = _chain_text(error)
    if 'No space left' in text or '[Errno 28]' in text or 'quota' in text:
      reason = f'the disk is full ({reason})'
    kept = [int(p.name) for p in self.folder.iterdir() if p.name.isdecimal()]
    newest = f'step {max(kept)}' if kept else 'none'
    return CheckpointError(
        f'cannot write a checkpoint to {self.folder}: {reason}.'
        f' Newest complete checkpoint: {newest}.'
    )


def read_part(
    folder: str | os.PathLike,
    name: str,
    abstract_tree: Any,
    step: int | None = None,
) -> tuple[int, Any, dict[str, Any]]:
  """Reads one entry of another run's checkpoint; changes nothing there.

  Args:
    folder: of the checkpoints.
    name: key of the saved tree's top dict, as in {'weights': ..., ...}.
    abstract_tree: what that entry holds, see `Checkpointer.restore_latest`.
    step: of the checkpoint; None for the newest.

  Returns:
    (step, the entry with the saved bits, JSON state).

  Raises:
    MismatchError: it holds other arrays.
    CheckpointError: there is no such checkpoint, or it is corrupt.
  """
  with Checkpointer(folder, read_only=True) as checkpointer:
    steps = checkpointer.steps()
    if not steps:
      raise CheckpointError(f'there is no checkpoint in {folder}')
    step = steps[-1] if step is None else step
    if step not in steps:
      raise CheckpointError(
          f'no checkpoint {step} in {folder}: there are {steps}'
      )
    wanted = {name: abstract_tree}
    try:
      tree, state = checkpointer._restore(step, wanted, f'{name}.')
    except MismatchError:
      raise
    except Exception as error:
      raise CheckpointError(
          f'checkpoint {step} in {folder} is corrupt: {_first_line(error)}'
      ) from error
  return step, tree[name], state


def params_sha256(tree: Any) -> str:
  """Returns the SHA-256 of a pytree of arrays, equal for equal bits.

  It covers, in sorted order of the key paths: path, dtype, shape and bytes.

  Args:
    tree: any pytree of JAX or NumPy arrays.

  Returns:
    64 hex digits.
  """
  digest = hashlib.sha256()
  for key, leaf in sorted(_flat(tree).items()):
    array = _host(leaf)
    digest.update(f'{key}|{array.dtype}|{list(array.shape)}|'.encode())
    digest.update(_bytes(array))
  return digest.hexdigest()


# ---------------------------------------------------------------------- trees


def _flat(tree: Any) -> dict[str, Any]:
  """Returns the leaves by key path, in order: any node type can be saved."""
  flat: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    key = jax.tree_util.keystr(path, simple=True, separator='.')
    if key in flat:
      raise TypeError(f'two leaves have the key path {key!r}')
    if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
      raise TypeError(
          f'leaf {key!r} is {type(leaf).__name__}, not an array; Python values'
          ' belong in the JSON state'
      )
    flat[key] = leaf
  return flat


def _storable(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the leaves as Orbax takes them: no empty arrays, keys as data."""
  return {
      name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
      for name, leaf in flat.items()
      if 0 not in leaf.shape
  }


def _wanted(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the abstract counterpart of `_storable`, with shardings."""
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  out = {}
  for name, leaf in flat.items():
    if 0 in leaf.shape:
      continue
    if isinstance(leaf, np.ndarray):
      out[name] = leaf
      continue
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if _is_key(leaf):
      shape = jax.eval_shape(jax.random.key_data, shape)
    sharding = getattr(leaf, 'sharding', None) or here
    out[name] = jax.ShapeDtypeStruct(
        shape.shape, shape.dtype, sharding=sharding
    )
  return out


def _rebuilt(restored: Mapping[str, Any], like: Any) -> dict[str, Any]:
  """Undoes `_storable`."""
  out = {}
  for name, leaf in like.items():
    if 0 in leaf.shape:
      empty = np if isinstance(leaf, np.ndarray) else jnp
      out[name] = empty.zeros(leaf.shape, leaf.dtype)
    elif _is_key(leaf):
      out[name] = _wrap_key(restored[name], leaf.dtype)
    else:
      out[name] = restored[name]
  return out


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _wrap_key(data: jax.Array, dtype: Any) -> jax.Array:
  for impl in ('threefry2x32', 'rbg', 'unsafe_rbg'):
    if jax.random.key(0, impl=impl).dtype == dtype:
      return jax.random.wrap_key_data(data, impl=impl)
  raise TypeError(f'cannot restore random keys of type {dtype}')


def _host(leaf: Any) -> np.ndarray:
  if _is_key(leaf):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf)


def _bytes(array: np.ndarray) -> memoryview:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _describe(leaf: Any) -> list[Any]:
  """Returns [dtype, shape, digest], as it is kept in the meta file."""
  if not getattr(leaf, 'is_fully_addressable', True):
    digest = ''  # spread over hosts: Orbax's own checks have to do
  else:
    digest = hashlib.sha256(_bytes(_host(leaf))).hexdigest()
  return [str(leaf.dtype), list(leaf.shape), digest]


def _check_match(step: int, saved: Mapping, wanted: Mapping[str, Any]) -> None:
  """Raises MismatchError, with the first differences, unless they agree."""
  lines = []
  for key in sorted(saved.keys() | wanted.keys()):
    old = new = 'absent'
    if key in saved:
      old = f'{saved[key][0]}{saved[key][1]}'
    if key in wanted:
      new = f'{wanted[key].dtype}{list(wanted[key].shape)}'
    if old != new:
      lines.append(f'\n  {key}: {old} saved, {new} wanted')
  if lines:
    more = f'\n  and {len(lines) - 5} more' if len(lines) > 5 else ''
    raise MismatchError(
        f'checkpoint {step} is of another policy or optimizer:'
        + ''.join(lines[:5])
        + more
    )


def _json_sha256(meta: Mapping[str, Any]) -> str:
  """Returns the digest of what comes back after a trip through JSON."""
  try:
    text = json.dumps(meta, sort_keys=True)
  except (TypeError, ValueError) as error:
    raise TypeError(f'the state is not JSON: {error}') from None
  if json.loads(text) != meta:
    text = json.dumps(json.loads(text), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


# --------------------------------------------------------------------- errors


def _first_line(error: BaseException) -> str:
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[0][:300]


def _chain_text(error: BaseException | None) -> str:
  texts = []
  while error is not None:
    texts.append(str(error))
    error = error.__cause__ or error.__context__
  return '\n'.join(texts)


class _NoOrbax(logging.Filter):
  """Drops Orbax's records: what matters is raised as an exception."""

  def filter(self, record: logging.LogRecord) -> bool:
    return f'{os.sep}orbax{os.sep}' not in record.pathname


def _quiet_orbax() -> None:
  logger = logging.getLogger('absl')
  if not any(isinstance(f, _NoOrbax) for f in logger.filters):
    logger.addFilter(_NoOrbax())
