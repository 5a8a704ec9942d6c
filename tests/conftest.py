"""Settings of every test, made before anything imports jax."""

import os
import pathlib

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Compiled programs are kept between test runs; deleting the folder is safe.
_CACHE = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache')
os.environ.setdefault(
    'JAX_COMPILATION_CACHE_DIR',
    str(_CACHE.expanduser() / 'agentic_rl' / 'jax_tests'),
)
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
