"""Messages between a pool and its workers: a length, then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any, Iterator

_LENGTH = struct.Struct('>I')
LENGTH_BYTES = _LENGTH.size


def pack(message: Any) -> bytes:
  """Returns a message as bytes, its length first."""
  data = json.dumps(message, separators=(',', ':')).encode()
  return _LENGTH.pack(len(data)) + data


def length(header: bytes | bytearray) -> int:
  """Returns the number of bytes that follow a header."""
  return _LENGTH.unpack(header)[0]


class Unpacker:
  """Turns bytes, as they arrive, into messages."""

  def __init__(self):
    self._buffer = bytearray()

  def feed(self, data: bytes) -> Iterator[Any]:
    """Yields the messages that are complete with `data`."""
    self._buffer += data
    start = 0
    while len(self._buffer) - start >= LENGTH_BYTES:
      body = start + LENGTH_BYTES
      end = body + length(self._buffer[start:body])
      if len(self._buffer) < end:
        break
      yield json.loads(self._buffer[body:end])
      start = end
    del self._buffer[:start]
