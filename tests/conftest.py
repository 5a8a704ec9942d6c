"""Settings of every test, made before anything uses jax."""

import hashlib
import os
import pathlib

import pytest


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

# Read once, on import, so not before.
import jax  # noqa: E402

# Tests of meshes need devices; the others use the first one.
jax.config.update('jax_num_cpu_devices', 8)


@pytest.fixture(autouse=True, scope='module')
def _programs_of_a_module():
  """Drops them after it: those of all modules fill gigabytes."""
  yield
  jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """All shapes compile for v5e by default, one of each test for other chips."""
  seen = set()
  for item in items:
    params = getattr(item, 'callspec', None) and item.callspec.params
    chip = (params or {}).get('chip', 'v5e')
    if item.get_closest_marker('tpu_compile') and chip != 'v5e':
      key = item.nodeid.partition('[')[0], chip, params.get('mode')
      if key in seen:
        item.add_marker(pytest.mark.slow)
      seen.add(key)
