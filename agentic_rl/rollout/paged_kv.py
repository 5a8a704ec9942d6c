"""Host-side book-keeping of KV pages: who owns them, which can be reused.

A full page is known by the weights that wrote it and by all tokens up to its
end, so a later sequence with the same beginning takes it instead of computing
it again. A page of other weights is never found: it is a miss. Routes live with
their page, so a prefix hit has them too.
"""

from __future__ import annotations

import collections
import hashlib

import numpy as np


class OutOfPagesError(RuntimeError):
  """The pool has no free page and nothing to evict."""


class PagePool:
  """Allocates pages, counts their owners and remembers full ones.

  Args:
    pages: usable pages; page `pages` is the bin for writes that must not land.
    page_size: tokens per page.

  Attributes:
    hits: pages taken from the prefix cache so far.
    misses: full pages that had to be computed so far.
    peak: most pages in use at once.
  """

  def __init__(self, pages: int, page_size: int):
    self.num_pages = pages
    self.page_size = page_size
    self.hits = self.misses = self.peak = 0
    self._free = list(range(pages - 1, -1, -1))
    self._owners = np.zeros(pages, np.int32)
    self._key_of: dict[int, bytes] = {}
    self._page_of: dict[bytes, int] = {}
    self._routes: dict[int, np.ndarray] = {}
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

  @property
  def bin(self) -> int:
    """The page that takes writes of padding."""
    return self.num_pages

  @property
  def in_use(self) -> int:
    """Pages that some sequence owns."""
    return self.num_pages - len(self._free) - len(self._idle)

  @property
  def available(self) -> int:
    """Pages that are free or can be evicted."""
    return len(self._free) + len(self._idle)

  def allocate(self) -> int:
    """Returns a page of its own, evicting the longest idle one if need be.

    Raises:
      OutOfPagesError: if every page has an owner.
    """
    if not self._free:
      if not self._idle:
        raise OutOfPagesError(f'all {self.num_pages} KV pages are in use')
      page, _ = self._idle.popitem(last=False)
      self._forget(page)
      self._free.append(page)
    page = self._free.pop()
    self._owners[page] = 1
    self.peak = max(self.peak, self.in_use)
    return page

  def release(self, page: int) -> None:
    """Gives up one ownership; a known page stays idle until it is evicted.

    Raises:
      ValueError: if nobody owns the page; nothing changes then.
    """
    if self._owners[page] < 1:
      raise ValueError(f'page {page} was released more often than owned')
    self._owners[page] -= 1
    if self._owners[page] == 0:
      if page in self._key_of:
        self._idle[page] = None
      else:
        self._free.append(page)

  def find(self, key: bytes) -> tuple[int, np.ndarray] | None:
    """Takes ownership of the page known by `key`, with its routes."""
    page = self._page_of.get(key)
    if page is None:
      return None
    self._idle.pop(page, None)
    self._owners[page] += 1
    self.hits += 1
    self.peak = max(self.peak, self.in_use)
    return page, self._routes[page]

  def remember(self, page: int, key: bytes, routes: np.ndarray) -> None:
    """Makes a full page findable; the first page of equal content stays."""
    self.misses += 1
    if key not in self._page_of:
      self._page_of[key] = page
      self._key_of[page] = key
      self._routes[page] = routes

  def forget_all(self) -> None:
    """Drops every known page (the weights changed)."""
    for page in list(self._key_of):
      self._forget(page)
    self._free.extend(self._idle)
    self._idle.clear()

  def _forget(self, page: int) -> None:
    del self._page_of[self._key_of.pop(page)]
    del self._routes[page]


def page_keys(tokens, page_size: int, weights: str) -> list[bytes]:
  """Returns the key of each full page: a hash chain over all tokens so far.

  Args:
    tokens: ids of a sequence.
    page_size: tokens per page.
    weights: names the weights that write the pages: version and content.
  """
  keys, last = [], weights.encode()
  for end in range(page_size, len(tokens) + 1, page_size):
    block = np.asarray(tokens[end - page_size : end], np.int32).tobytes()
    last = hashlib.blake2b(last + block, digest_size=16).digest()
    keys.append(last)
  return keys
