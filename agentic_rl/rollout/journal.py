"""Trajectories on disk: one gzip file of JSON lines per collection.

Each line is one trajectory with the fields of `types.Trajectory`:

  {"rollout_id": 7, "task_id": "…", "seed": 0, "tokens": [1, 17, …],
   "sampled": [[12, 17], …],          half-open spans of drawn tokens
   "logp_behavior": [-0.25, …],       of the drawn tokens only, in order
   "weight_version": 3, "status": "submitted", "reward": 1.0,
   "turns": [{"text": "test", "name": "test", "valid": true, "start": 12,
              "end": 14, "state": "…", "reward": 0.0, "observation": "PASS",
              "obs_start": 14, "obs_end": 16, "advantage": 0.5}, …],
   "info": {…}}

A float32 written as decimal comes back with the same bits. Routes and supports
are not kept: the policy of the same version gives them again.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib
from typing import Any, Iterator, Sequence

import numpy as np

from agentic_rl import metrics
from agentic_rl import types

_MALFORMED = KeyError, TypeError, ValueError, OverflowError, RecursionError


def path_of(workdir: str | os.PathLike, phase: str, step: int) -> pathlib.Path:
  """Returns the file of a collection."""
  return pathlib.Path(workdir) / 'trajectories' / f'{phase}-{step:06d}.jsonl.gz'


def write(
    path: str | os.PathLike,
    trajectories: Sequence[types.Trajectory],
    advantages: Sequence[np.ndarray] | None = None,
) -> None:
  """Writes trajectories atomically.

  Args:
    path: the file; its folder is made.
    trajectories: any number.
    advantages: one array [A] per trajectory, kept beside the turns.

  Raises:
    OSError: the disk is full or gone.
  """
  lines = []
  for i, trajectory in enumerate(trajectories):
    own = None if advantages is None else advantages[i]
    lines.append(json.dumps(_to_json(trajectory, own)))
  data = gzip.compress('\n'.join(lines).encode(), 3, mtime=0)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  metrics.write_atomically(path, data)


def read(path: str | os.PathLike) -> Iterator[types.Trajectory]:
  """Yields the trajectories of a file.

  Raises:
    ValueError: a line is no trajectory; names the file and the line.
  """
  with gzip.open(path, 'rt') as file:
    for number, line in enumerate(file, 1):
      try:
        yield _from_json(json.loads(line))
      except _MALFORMED as error:
        raise ValueError(
            f'{path} line {number}: not a trajectory ({error!r})'
        ) from error


def _to_json(t: types.Trajectory, advantages) -> dict[str, Any]:
  edges = np.flatnonzero(
      np.diff(t.sampled.astype(np.int8), prepend=0, append=0)
  )
  turns = []
  for i, turn in enumerate(t.turns):
    line = dataclasses.asdict(turn)
    line = {**line.pop('action'), **line}
    if advantages is not None:
      line['advantage'] = float(advantages[i])
    turns.append(line)
  return {
      'rollout_id': t.rollout_id,
      'task_id': t.task_id,
      'seed': t.seed,
      'tokens': t.tokens.tolist(),
      'sampled': edges.reshape(-1, 2).tolist(),
      'logp_behavior': t.logp_behavior[t.sampled].tolist(),
      'weight_version': t.weight_version,
      'status': t.status.value,
      'reward': t.reward,
      'turns': turns,
      'info': dict(t.info),
  }


def _from_json(line: dict[str, Any]) -> types.Trajectory:
  tokens = np.asarray(line['tokens'], np.int32)
  sampled = np.zeros(len(tokens), bool)
  for start, end in line['sampled']:
    sampled[start:end] = True
  logp = np.zeros(len(tokens), np.float32)
  logp[sampled] = np.asarray(line['logp_behavior'], np.float32)
  turns = []
  for t in line['turns']:
    names = [f.name for f in dataclasses.fields(types.Action)]
    action = types.Action(**{k: t[k] for k in names})
    rest = ('state', 'reward', 'observation', 'obs_start', 'obs_end')
    turns.append(types.Turn(action, **{k: t[k] for k in rest}))
  return types.Trajectory(
      rollout_id=line['rollout_id'],
      task_id=line['task_id'],
      seed=line['seed'],
      tokens=tokens,
      sampled=sampled,
      logp_behavior=logp,
      routes=None,
      weight_version=line['weight_version'],
      turns=tuple(turns),
      status=types.Status(line['status']),
      reward=line['reward'],
      info=line['info'],
  )
