"""Settings of every test, made before anything imports jax."""

import hashlib
import os
import pathlib


def _cache_folder() -> str:
  """Returns a folder for compiled programs, one for each kind of processor.

  Programs are kept between test runs; deleting the folder is safe.
  """
  base = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache')
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    flags = next((x for x in lines if x.startswith(('flags', 'Features'))), '')
  except OSError:
    flags = ''
  kind = hashlib.sha256(flags.encode()).hexdigest()[:12]
  return str(base.expanduser() / 'agentic_rl' / f'jax_tests_{kind}')


os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', _cache_folder())
os.environ.setdefault('JAX_COMPILATION_CACHE_MAX_SIZE', str(2**30))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
