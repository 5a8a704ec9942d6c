"""What attention of a layer looks like, apart from the pages it selects."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Form:
  """Static options of one layer's attention.

  Attributes:
    window: visible positions of a sliding window, or None.
    soft_cap: bound of the scores, which become cap · tanh(s / cap); 0 for none.
    sink_page: the first page of a sequence is visible to all of its tokens.

  Raises:
    ValueError: on a window below 1 or a cap that is no bound.
  """

  window: int | None = None
  soft_cap: float = 0.0
  sink_page: bool = False

  def __post_init__(self):
    if self.window is not None and self.window < 1:
      raise ValueError(f'window={self.window}: at least 1, or None, is allowed')
    if not 0 <= self.soft_cap < math.inf:
      raise ValueError(
          f'soft_cap={self.soft_cap}: a finite bound above 0, or 0 for none, is'
          ' allowed'
      )
