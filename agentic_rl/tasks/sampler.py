"""Draws the tasks of each step, for ever, through a grain pipeline.

`TaskSampler.create(name='fresh', ...)` generates every task when it is drawn,
so that training never sees one twice; `name='fixed'` shuffles a saved task
set, again at each pass. The state is a small JSON value: a restored sampler
goes on with the very next task.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping, Protocol, Sequence

from agentic_rl import types
from agentic_rl.tasks import generate
from agentic_rl.tasks import taskset

_FRESH_COUNT = 2**31 - 1  # a pass over fresh tasks; grain indexes 32 bits


class Source(Protocol):
  """Tasks by index, and a key that tells one source from another."""

  key: str
  shuffle: bool

  def __len__(self) -> int:
    ...

  def __getitem__(self, index: int) -> types.Task:
    ...


class FreshTasks:
  """Generated tasks: the index decides the task."""

  shuffle = False  # consecutive seeds are independent already

  def __init__(
      self,
      seed: int,
      split: str = 'train',
      difficulty: generate.Difficulty | str | Mapping[str, Any] = 'default',
      **options: Any,
  ):
    """Takes the arguments of `generate_task`; `seed` offsets its seeds."""
    self._seed = seed
    self._split = split
    self._difficulty = generate.Difficulty.parse(difficulty)
    self._options = options
    self.key = types.content_hash(
        [
            'fresh',
            generate.GENERATOR_VERSION,
            seed,
            split,
            self._difficulty.to_json(),
            options,
        ]
    )
    self[0]  # a bad option fails here, not in the middle of a run

  def __len__(self) -> int:
    return _FRESH_COUNT

  def __getitem__(self, index: int) -> types.Task:
    return generate.generate_task(
        self._seed * _FRESH_COUNT + int(index),
        self._split,
        self._difficulty,
        **self._options,
    )


class FixedTasks:
  """Tasks that exist: a sequence, or the path of a saved task set."""

  shuffle = True

  def __init__(
      self,
      seed: int,
      tasks: Sequence[types.Task] | str | os.PathLike[str],
  ):
    del seed  # the order is drawn by the sampler
    if isinstance(tasks, (str, os.PathLike)):
      tasks = taskset.load(tasks).tasks
    if not tasks:
      raise ValueError('tasks are empty; allowed: at least one task')
    self._tasks = tuple(tasks)
    self.key = types.content_hash(['fixed', [t.task_id for t in self._tasks]])

  def __len__(self) -> int:
    return len(self._tasks)

  def __getitem__(self, index: int) -> types.Task:
    return self._tasks[index]


SOURCES: dict[str, Callable[..., Source]] = {
    'fresh': FreshTasks,
    'fixed': FixedTasks,
}


class TaskSampler:
  """An endless stream of tasks, deterministic in its seed."""

  def __init__(self, source: Source, seed: int = 0):
    """Starts at the first task.

    Args:
      source: where tasks come from.
      seed: decides the order of a source that is shuffled.
    """
    import grain  # imports JAX, which environment workers must not

    self._key = types.content_hash([source.key, seed])
    data = grain.MapDataset.source(source).seed(seed)
    if source.shuffle:
      data = data.shuffle()
    # No threads: a task takes less than a millisecond.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._iterator = iter(data.repeat(None).to_iter_dataset(options))

  @classmethod
  def create(cls, name: str, seed: int = 0, **options: Any) -> TaskSampler:
    """Makes a sampler from a config: a key of `SOURCES` and its arguments."""
    if name not in SOURCES:
      raise ValueError(f'name is {name!r}; allowed: {sorted(SOURCES)}')
    return cls(SOURCES[name](seed, **options), seed)

  def next_batch(self, count: int) -> list[types.Task]:
    """Returns the next `count` tasks (P of a step)."""
    if count < 1:
      raise ValueError(f'count is {count!r}; allowed: at least 1')
    return [next(self._iterator) for _ in range(count)]

  def state(self) -> dict[str, Any]:
    """Returns the position as JSON values."""
    return {'key': self._key, 'iterator': dict(self._iterator.get_state())}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes to the position of `state`.

    Raises:
      ValueError: the state is of another source or seed.
    """
    if state.get('key') != self._key:
      raise ValueError(
          f'state has key {state.get("key")!r}; allowed: {self._key!r}, of the '
          'same source, options and seed'
      )
    self._iterator.set_state(dict(state['iterator']))
