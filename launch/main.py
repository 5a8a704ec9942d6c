"""Trains: `python launch/main.py --config=configs/swe.py[:arg]`.

Any field is overridden by its path, `--config.credit.name=grpo`. The first
Ctrl-C (or SIGTERM) asks for a stop at the next safe point, with a checkpoint;
the second aborts. The same command continues in the same work directory.
"""

import os
import pathlib
import signal
import sys
import threading

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from configs import common

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file and argument: configs/swe.py[:arg].'
)
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Where to write; by default runs/<config>-<arg>-seed<n>.'
)
flags.mark_flag_as_required('config')


def parse_flags(argv):
  """Parses the flags; a mistake in the config is one message, exit code 2."""
  try:
    return app.parse_flags_with_usage(common.prepare_argv(argv))
  except common.ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


def stop_on_signals() -> threading.Event:
  """Returns an event that the first SIGINT or SIGTERM sets."""
  stop = threading.Event()

  def handle(signum, frame):
    del signum, frame
    if stop.is_set():
      raise KeyboardInterrupt
    stop.set()
    # Not print: the signal may come while another print holds the lock.
    os.write(2, b'\nStopping at the next safe point; once more aborts.\n')

  signal.signal(signal.SIGINT, handle)
  signal.signal(signal.SIGTERM, handle)
  return stop


def main(argv) -> None:
  """Runs the training that the flags describe."""
  if len(argv) > 1:
    sys.exit(f'error: unexpected argument {argv[1]!r}')
  logging.set_verbosity(logging.WARNING)
  config = _CONFIG.value
  spec = config_flags.get_config_filename(flags.FLAGS['config'])
  workdir = _WORKDIR.value or common.default_workdir(
      spec, config.get('seed', 0)
  )
  stop = stop_on_signals()
  from agentic_rl import checkpoint  # JAX loads only now
  from agentic_rl import monitor
  from agentic_rl import train
  from agentic_rl.envs import protocol
  from agentic_rl.learner import update

  try:
    train.train(config, workdir, stop=stop)
  except KeyboardInterrupt:
    print('aborted; the newest checkpoint is kept', file=sys.stderr)
    sys.exit(130)
  except (
      common.ConfigError,
      checkpoint.CheckpointError,
      protocol.EnvironmentFailure,
      monitor.MismatchError,
      update.DivergedError,
      OSError,  # the disk is full, a file may not be read
  ) as error:
    sys.exit(f'error: {error}')


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
