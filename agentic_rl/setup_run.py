"""Builds the parts of a run from its config and checks all of them first."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import math
import os
import pathlib
import shutil
from typing import Any, Iterator

import jax

from agentic_rl import checkpoint as checkpoint_lib
from agentic_rl import credit
from agentic_rl import metrics as metrics_lib
from agentic_rl import types
from agentic_rl import warm_source
from agentic_rl.envs import pool as pool_lib
from agentic_rl.envs import sandbox
from agentic_rl.learner import optimizer as optimizer_lib
from agentic_rl.learner import update
from agentic_rl.parallel import mesh
from agentic_rl.policy import chat as chat_lib
from agentic_rl.policy import config as policy_config
from agentic_rl.policy import model
from agentic_rl.policy import tokenizer as tokenizer_lib
from agentic_rl.rollout import collect
from agentic_rl.rollout import engine as engine_lib
from agentic_rl.rollout import engines as engines_lib
from agentic_rl.tasks import expert
from agentic_rl.tasks import generate
from agentic_rl.tasks import sampler as sampler_lib
from agentic_rl.tasks import taskset
from configs import common
from kernels_pallas import numerics as nx
from kernels_pallas.row_ops import ops as row_ops

RESOLVED = 'config.json'
# The smallest value of fields that are counts.
_LEAST = {
    'seed': 0,
    'tokenizer.corpus_tasks': 1,
    'warm_start.steps': 0,
    'warm_start.sequences': 1,
    'warm_start.rows': 1,
    'warm_start.checkpoint_every': 1,
    'policy.heads': 1,
    'policy.experts': 0,
    'policy.expert_width': 1,
    'policy.dense_width': 1,
    'rollout.tasks': 1,
    'rollout.group': 1,
    'rollout.max_sequences': 1,
    'rollout.engines': 1,
    'rollout.pool_pages': 0,
    'learner.iterations': 1,
    'learner.rows': 1,
    'evaluation.tasks': 1,
    'evaluation.greedy_tasks': 1,
    'evaluation.every': 0,
    'checkpoint.keep': 1,
    'checkpoint.rl_every': 1,
}
_SEEDS = 1 << 32  # a seed is a 32-bit number in the samplers' keys
# Fields that may change between the runs of one work directory.
FREE = (
    'evaluation.every', 'checkpoint', 'alerts', 'env_pool', 'mesh',
    'learner.on_mismatch',
)  # fmt: skip
ON_MISMATCH = ('warn', 'skip', 'stop')  # see `monitor`


class Run:
  """The parts of a run; a context manager that closes them.

  Attributes:
    config: the resolved config.
    workdir: where everything is written.
    fresh: whether the directory holds no run yet.
    summary: of a run that is finished already; then nothing else is there.
    parallel: the mesh.
    policy: shape of the policy.
    chat: the token format.
    heldout: tasks of the evaluation.
    metrics: the writer.
    pool: environments in worker processes.
    engine: the sampler.
    collector: runs rollouts.
    learner: of the reinforcement phase.
    sampler: draws the tasks of the reinforcement phase.
    warm_start_s: seconds that the warm start took, in all runs together.
    earlier_s: the part of it that earlier processes spent.
  """

  def __init__(self, config: Any, workdir: pathlib.Path):
    self.config, self.workdir = config, workdir
    self.stack = contextlib.ExitStack()
    self.fresh = True
    self.summary: dict[str, Any] | None = None
    self.parallel: mesh.Parallel
    self.policy: policy_config.PolicyConfig
    self.chat: chat_lib.Chat
    self.heldout: tuple[types.Task, ...]
    self.metrics: metrics_lib.Metrics
    self.pool: pool_lib.EnvPool
    self.engine: engines_lib.Engines | engines_lib.MeshEngines
    self.collector: collect.Collector
    self.learner: update.Learner
    self.sampler: sampler_lib.TaskSampler
    self.warm_start_s = 0.0
    self.earlier_s = 0.0
    self._checkpoints: dict[str, checkpoint_lib.Checkpointer] = {}
    self._kept: dict[str, int] = {}
    self._opened = False

  def checkpoints(self, phase: str) -> checkpoint_lib.Checkpointer:
    """Returns the checkpoints of a phase."""
    if phase not in self._checkpoints:
      self._checkpoints[phase] = self.stack.enter_context(
          checkpoint_lib.Checkpointer(
              self.workdir / 'checkpoints' / phase,
              keep=self.config.checkpoint.keep,
              warn=lambda text: self.metrics.note(text),
          )
      )
    return self._checkpoints[phase]

  def restore(
      self, phase: str, tree: Any
  ) -> tuple[int, Any, dict[str, Any]] | None:
    """Restores the newest sound checkpoint of a phase, and its metrics.

    Args:
      phase: 'warm_start' or 'rl'.
      tree: what to restore into.

    Returns:
      (step, tree, JSON state), or None if there is none.
    """
    saved = self.checkpoints(phase).restore_latest(tree)
    if saved is not None and saved[0] < self._kept.get(phase, saved[0]):
      # A corrupt checkpoint was set aside: forget what was logged after the
      # one before it.
      self.open_metrics()
    return saved

  def open_metrics(self) -> None:
    """Opens the metrics where the newest checkpoints are."""
    if self._opened:
      self.metrics.close()
    self._kept, self._opened = _resume_steps(self), True
    self.metrics = self.stack.enter_context(
        metrics_lib.Metrics(
            self.workdir, resume=self._kept, alerts=_alerts(self.config)
        )
    )

  def open_checkpoints(self) -> Iterator[checkpoint_lib.Checkpointer]:
    """Yields those that were used."""
    return iter(self._checkpoints.values())

  def __enter__(self) -> Run:
    return self

  def __exit__(self, *error) -> None:
    self.stack.__exit__(*error)


def setup(config: Any, workdir: pathlib.Path) -> Run:
  """Builds everything; whatever is wrong is said here, before work is done.

  Args:
    config: from a config file.
    workdir: made if it is missing; a run of the same config may be there.

  Returns:
    The run, to be used as a context manager.

  Raises:
    ConfigError: a field has no sense, or the directory is taken.
    EnvironmentFailure: environments do not start here.
  """
  run = Run(config, workdir)
  try:
    mesh.host_devices(config.mesh)
    prepare_process()
    _claim(run)
    if not run.fresh:
      run.summary = _finished(workdir)
    if run.summary is None:
      _build(run)
    if run.summary is None:  # from here on it runs, with what may have changed
      common.save_resolved(config, workdir / RESOLVED)
  except ValueError as error:
    run.stack.close()
    raise common.ConfigError(str(error)) from error
  except AttributeError as error:
    run.stack.close()
    if not isinstance(error.obj, common.ConfigDict):
      raise
    raise common.ConfigError(f'the config lacks a field: {error}') from error
  except BaseException:
    run.stack.close()
    raise
  return run


def _claim(run: Run) -> None:
  """Takes the work directory and checks that it is of this config."""
  path = run.workdir / RESOLVED
  try:
    run.workdir.mkdir(parents=True, exist_ok=True)
    lock = run.stack.enter_context(open(run.workdir / '.lock', 'w'))
  except OSError as error:
    raise common.ConfigError(f'workdir {run.workdir}: {error}') from error
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    raise common.ConfigError(
        f'workdir {run.workdir} is in use by another process'
    ) from None
  if sandbox.exposed(run.workdir):
    raise common.ConfigError(
        f'workdir {run.workdir}: sandboxes show this part of the system to the'
        ' code of agents, which could read the held-out tasks; choose another'
    )
  check_numbers(run.config)
  run.fresh = not path.exists()
  if not run.fresh:
    common.check_same(run.config, path, free=FREE)
  # Halves of files that a killed run was writing.
  for pattern in ('.*.tmp', 'trajectories/.*.tmp', '.*.partial'):
    for half in run.workdir.glob(pattern):
      shutil.rmtree(half) if half.is_dir() else half.unlink()


def check_numbers(config: Any) -> None:
  """Raises ValueError if a number of a config has no sense."""
  values = common.fields(config)
  for path, value in values.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f'{path}={value}: a finite number is needed')
  if values.get('seed', 0) >= _SEEDS:
    raise ValueError(f'seed={values["seed"]}: allowed is below {_SEEDS}')
  for path, least in _LEAST.items():
    value = values.get(path, least)
    if value < least:
      raise ValueError(f'{path}={value}: allowed is {least} or more')


def _finished(workdir: pathlib.Path) -> dict[str, Any] | None:
  """Returns the summary of a finished run; it is written last."""
  path = workdir / metrics_lib.SUMMARY
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except ValueError as error:
    raise common.ConfigError(f'{path} is damaged: {error}') from None


def _build(run: Run) -> None:
  config = run.config
  run.parallel = mesh.make(config.mesh)
  run.heldout = _heldout(run)
  made_for = run.heldout[0].env
  if made_for != config.env.name:
    raise ValueError(
        f'env.name={config.env.name!r}: the tasks of this run are made for'
        f' {made_for!r}'
    )
  run.chat = chat_lib.Chat(_tokenizer(run))
  run.policy = policy_config.make(
      'small',
      {'vocab': run.chat.tokenizer.vocab_size, **dict(config.policy.items())},
  )
  source = _source(run)
  if source is not None:
    source.check(run.policy, run.heldout)
  shapes = jax.eval_shape(lambda: model.init(run.policy, 0))
  mesh.check(run.parallel, shapes, model.logical_axes(run.policy))
  nx.choose(run.policy.impl, row_ops.IMPLS, 'policy')
  if 0 < config.rollout.pool_pages < config.rollout.engines:
    raise ValueError(
        f'rollout.pool_pages={config.rollout.pool_pages}: allowed is 0, for'
        f' enough, or a page or more for each of {config.rollout.engines}'
        ' engines'
    )
  sampling = engine_lib.Sampling(**dict(config.sampling.items()))
  if not sampling.temperature > 0:
    raise ValueError('sampling.temperature=0: training needs a value above 0')
  with _about('credit'):
    credit.make(config.credit.name, **common.options(config.credit))
  limits = collect.Limits(
      config.rollout.action_tokens, config.rollout.deadline_s
  )
  if config.learner.on_mismatch not in ON_MISMATCH:
    raise ValueError(
        f'learner.on_mismatch={config.learner.on_mismatch!r}: allowed are'
        f' {ON_MISMATCH}'
    )
  run.learner = _learner(run, sampling)
  if config.learner.row_tokens < run.policy.max_context:
    raise ValueError(
        f'learner.row_tokens={config.learner.row_tokens}: a row holds a whole'
        f' sequence, policy.max_context={run.policy.max_context} tokens or more'
    )
  with _about('warm_start.optimizer'):
    steps = max(1, config.warm_start.steps)
    optimizer_from(config.warm_start.optimizer, steps, run.policy)
  with _about('warm_start.noise'):
    expert.Noise(**dict(config.warm_start.noise.items()))
  run.sampler = sampler_lib.TaskSampler.create(
      config.tasks.name,
      2 * config.seed,
      **common.options(config.tasks),
  )
  longest = max(len(run.chat.prompt_ids(t.prompt)) for t in run.heldout)
  if longest + limits.action_tokens >= run.policy.max_context:
    raise ValueError(
        f'policy.max_context={run.policy.max_context}: a prompt of {longest}'
        f' tokens and an action of {limits.action_tokens} do not fit'
    )
  run.pool = run.stack.enter_context(
      pool_lib.EnvPool(
          config.env.name,
          common.options(config.env),
          workers=config.env_pool.workers,
          deadline_s=config.env_pool.deadline_s,
      )
  )
  run.engine = _engine(run, sampling)
  run.collector = collect.Collector(run.engine, run.pool, run.chat, limits)
  run.open_metrics()


@contextlib.contextmanager
def _about(path: str) -> Iterator[None]:
  """Says in errors which part of the config they are about."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def optimizer_from(
    options: Any, steps: int, policy: policy_config.PolicyConfig
):
  """Returns the optimizer that a config's dict describes, for a policy."""
  options = dict(options.items())
  cast = None if policy.precision == 'float32' else policy.numerics.cast
  return optimizer_lib.make(
      options.pop('name'), steps=steps, cast=cast, **options
  )


def _engine(run: Run, sampling: engine_lib.Sampling):
  options = dict(
      max_sequences=run.config.rollout.max_sequences,
      pool_pages=run.config.rollout.pool_pages,
      sampling=sampling,
      route_weights=run.config.learner.routing_replay == 'ids_and_weights',
  )
  with _about('rollout'):
    if run.parallel.mesh is not None:
      return engines_lib.MeshEngines(
          run.policy, run.config.seed, parallel=run.parallel, **options
      )
    return engines_lib.Engines(
        run.policy,
        run.config.seed,
        engines=run.config.rollout.engines,
        **options,
    )


def _learner(run: Run, sampling: engine_lib.Sampling) -> update.Learner:
  c = run.config.learner
  with _about('learner'):
    loss = update.LossConfig(
        c.loss.name,
        options=tuple(sorted(common.options(c.loss).items())),
        temperature=sampling.temperature,
        entropy=c.entropy,
        reference_kl=c.reference_kl,
        balance=c.balance,
        anchor=c.anchor,
        correction=c.correction.name,
        correction_options=tuple(sorted(common.options(c.correction).items())),
        routing_replay=c.routing_replay,
    )
    if c.routing_replay != 'none' and not run.policy.moe_layers:
      raise ValueError(
          f'routing_replay={c.routing_replay!r}: the policy has no experts'
      )
  with _about('learner.optimizer'):
    optimizer = optimizer_from(c.optimizer, c.iterations, run.policy)
  with _about('learner'):
    return update.Learner(
        run.policy,
        loss,
        optimizer,
        rows=c.rows,
        row_tokens=c.row_tokens,
        parallel=run.parallel,
    )


def _source(run: Run) -> warm_source.Source | None:
  """Returns whose warm start is taken; None if this run has its own."""
  folder = run.config.warm_start.weights
  if not folder or run.checkpoints('warm_start').steps():
    return None
  return warm_source.Source(folder)


def _heldout(run: Run) -> tuple[types.Task, ...]:
  """Makes the held-out tasks, or loads those of this directory."""
  c = run.config
  folder = run.workdir / 'heldout'
  count = max(c.evaluation.tasks, c.evaluation.greedy_tasks)
  if folder.exists() and not run.fresh:
    return taskset.load(folder).tasks
  tasks = tuple(
      generate.generate_tasks(
          count,
          'heldout',
          c.tasks.fresh.difficulty,
          holdout_fraction=c.tasks.fresh.holdout_fraction,
      )
  )
  made = taskset.TaskSet(
      tasks,
      'heldout',
      {'name': 'swe', 'version': generate.GENERATOR_VERSION},
      common.plain(c.tasks.fresh),
  )
  taskset.save(folder, made, overwrite=True)
  return tasks


def _tokenizer(run: Run) -> tokenizer_lib.Tokenizer:
  """Trains the tokenizer, or loads that of this directory."""
  path = run.workdir / 'tokenizer.json'
  if path.exists() and not run.fresh:
    return tokenizer_lib.Tokenizer.load(path)
  c = run.config
  source = _source(run)
  if source is not None:
    made = source.tokenizer(common.plain(c.tokenizer))
  else:
    made = train_tokenizer(c)
  made.save(path)
  return made


def train_tokenizer(config: Any) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer that a config describes."""
  tasks = generate.generate_tasks(
      config.tokenizer.corpus_tasks,
      'train',
      config.tasks.fresh.difficulty,
      holdout_fraction=config.tasks.fresh.holdout_fraction,
  )
  return tokenizer_lib.Tokenizer.train(
      expert.corpus(tasks), config.tokenizer.vocab_size
  )


def _resume_steps(run: Run) -> dict[str, int]:
  """Returns the last step of each phase that a checkpoint holds."""
  steps = {}
  for phase in ('warm_start', 'rl'):
    saved = run.checkpoints(phase).steps()
    if saved:
      steps[phase] = saved[-1]
  if 'rl' in steps:
    # The evaluation after the last iteration comes after its checkpoint.
    steps['heldout'] = min(steps['rl'], run.config.learner.iterations - 1)
  return steps


def _alerts(config: Any):
  bounds = {}
  for name, low, high in config.alerts:
    bounds[name] = (low, high)
  return bounds


def prepare_process() -> None:
  """Settings of the process: compilation cache and memory allocator."""
  if jax.config.jax_compilation_cache_dir is None:
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    jax.config.update(
        'jax_compilation_cache_dir', os.path.join(cache, 'agentic_rl', 'jax')
    )
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
  reuse_freed_memory()


@functools.cache
def reuse_freed_memory() -> bool:
  """Tells glibc to keep large freed blocks: they need no new page faults.

  A step of the learner frees and takes hundreds of megabytes; giving them back
  to the system in between costs a third of its time on CPU.

  Returns:
    False where the C library has no such switch.
  """
  try:
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4
    return bool(
        libc.mallopt(m_mmap_max, 0)
        and libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    )
  except (OSError, AttributeError):
    return False


def peak_memory_gb() -> float:
  """Returns the peak resident memory of this process in 10^9 bytes."""
  # Not of getrusage, which counts the process that started this one, too.
  status = pathlib.Path('/proc/self/status').read_text()
  (line,) = (x for x in status.splitlines() if x.startswith('VmHWM:'))
  return int(line.split()[1]) * 1024 / 1e9
