"""Tensors in files of the format safetensors, one or several of a folder.

A file is 8 bytes, the size of the header; the header, a JSON object that gives
dtype, shape and place of each tensor by its name; and the data. An index names
the file of each tensor if there are several. A tensor is read when it is asked
for, so that no more than one is in memory.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_DTYPES: dict[str, Any] = {
    'F32': np.float32,
    'F16': np.float16,
    'BF16': jnp.bfloat16,
}


class _Entry(NamedTuple):
  """Where a tensor lies; `start` and `size` count bytes."""

  path: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  start: int
  size: int


class Tensors:
  """The tensors of a folder.

  Args:
    folder: with `model.safetensors`, or an index and the files it names.

  Raises:
    ValueError: a file is damaged, or holds other tensors than the index says.
    OSError: a file can not be read.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    self.folder = pathlib.Path(folder)
    self._used: set[str] = set()
    if not (self.folder / INDEX).exists():
      self._entries = _entries(self.folder / SINGLE)
      return
    if (self.folder / SINGLE).exists():
      raise ValueError(f'{folder} holds {SINGLE} and {INDEX}: allowed is one')
    files = read_object(self.folder / INDEX).get('weight_map')
    if not isinstance(files, dict):
      raise ValueError(f'{self.folder / INDEX}: no weight_map')
    self._entries = {}
    for file in sorted(set(map(str, files.values()))):
      for name, entry in _entries(self.folder / file).items():
        if files.get(name) != file:
          raise ValueError(
              f'{entry.path} holds the tensor {name!r}; {INDEX} says'
              f' {files.get(name)!r}'
          )
        self._entries[name] = entry
    for name in sorted(files.keys() - self._entries.keys()):
      raise ValueError(f'{self.folder / files[name]} lacks the tensor {name!r}')

  def __contains__(self, name: str) -> bool:
    return name in self._entries

  def unused(self) -> list[str]:
    """Returns the names of the tensors that were never read."""
    return sorted(self._entries.keys() - self._used)

  def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor as it is stored.

    Args:
      name: of the tensor.
      shape: that it must have.

    Raises:
      ValueError: there is none, or it has another shape or no known dtype.
    """
    if name not in self._entries:
      raise ValueError(f'{self.folder} lacks the tensor {name!r}')
    self._used.add(name)
    path, dtype, found, start, size = self._entries[name]
    if dtype not in _DTYPES:
      raise ValueError(
          f'{path}: tensor {name!r} is of type {dtype}; allowed are'
          f' {", ".join(_DTYPES)}'
      )
    if found != shape:
      raise ValueError(
          f'{path}: tensor {name!r} is {list(found)}; allowed is {list(shape)}'
      )
    kind = np.dtype(_DTYPES[dtype])
    if size != math.prod(shape) * kind.itemsize:
      raise ValueError(f'{path}: tensor {name!r} is damaged: {size} bytes')
    with open(path, 'rb') as file:
      file.seek(start)
      return np.frombuffer(file.read(size), kind).reshape(shape)


def _entries(path: pathlib.Path) -> dict[str, _Entry]:
  """Returns what the header of a file says, by tensor."""
  whole = path.stat().st_size
  with open(path, 'rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if 8 + length > whole:
      raise ValueError(f'{path} is cut off, or not of the format safetensors')
    header = _object(path, file.read(length))
  header.pop('__metadata__', None)
  out = {}
  for name, value in header.items():
    try:
      low, high = (int(n) + 8 + length for n in value['data_offsets'])
      shape = tuple(map(int, value['shape']))
      out[name] = _Entry(path, str(value['dtype']), shape, low, high - low)
    except (KeyError, TypeError, ValueError):
      raise ValueError(f'{path}: tensor {name!r} has no sound entry') from None
    if not 8 + length <= low <= high <= whole:
      raise ValueError(f'{path} is cut off: tensor {name!r} is not whole')
  return out


def read_object(path: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object of a file.

  Raises:
    ValueError: it holds something else.
    OSError: it can not be read.
  """
  return _object(path, path.read_bytes())


def _object(path: pathlib.Path, content: bytes) -> dict[str, Any]:
  try:
    value = json.loads(content)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None
  if not isinstance(value, dict):
    raise ValueError(f'{path}: no JSON object')
  return value
