"""Compiles for TPU on a machine that has none: the compiler is in libtpu.

Source: `jax.experimental.topologies`. A program is lowered for a chip that is
only described, so its shapes, memory and instructions are real and its results
are not there.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Sequence

import jax
import numpy as np
from jax.experimental import topologies

from kernels_pallas import numerics as nx


@dataclasses.dataclass(frozen=True)
class Chip:
  """A TPU.

  Attributes:
    topology: a small slice of it, by its name in libtpu.
    clock_hz: cycles per second of a core.
    bf16_flops: peak of a chip per second.
    hbm_bytes: bandwidth of a chip's memory per second.
    vmem_bytes: on-chip memory that a kernel may use.
  """

  topology: str
  clock_hz: float
  bf16_flops: float
  hbm_bytes: float
  vmem_bytes: int


CHIPS = {
    'v5e': Chip('v5e:2x2', 1.5e9, 197e12, 819e9, 128 << 20),
    'v5p': Chip('v5p:2x2x1', 1.75e9, 459e12, 2765e9, 128 << 20),
    'v6e': Chip('v6e:2x2', 1.75e9, 918e12, 1640e9, 128 << 20),
    'tpu7x': Chip('tpu7x:2x2x1', 1.9e9, 2307e12, 7380e9, 64 << 20),
}

# libtpu reads these when it is loaded; they keep it from looking for a TPU.
_ENVIRONMENT = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'TPU_LOG_DIR': 'disabled',
    'TPU_MIN_LOG_LEVEL': '3',
    'TPU_STDERR_LOG_LEVEL': '3',
    # Several processes may compile at once, since none of them has a TPU.
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def compile_for(
    fun: Callable[..., Any], args: Sequence[Any], chip: str
) -> jax.stages.Compiled:
  """Compiles `fun` for one device of a TPU.

  Args:
    fun: the function.
    args: `jax.ShapeDtypeStruct`s.
    chip: key of `CHIPS`.

  Raises:
    ValueError: on an unknown chip.
    RuntimeError: if libtpu is missing, or this process runs on a TPU.
    Exception: of the compiler, if it refuses the program.
  """
  mesh = jax.sharding.Mesh(np.array(devices(chip)[:1]), ('x',))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with jax.set_mesh(mesh), nx.target('tpu'):
    return jax.jit(fun, in_shardings=whole).lower(*args).compile()


def devices(chip: str) -> Sequence[Any]:
  """Returns the devices of a small slice, to compile for.

  Args:
    chip: key of `CHIPS`.

  Raises:
    ValueError: on an unknown chip.
    RuntimeError: if libtpu is missing, or this process runs on a TPU.
  """
  if chip not in CHIPS:
    raise ValueError(f'chip={chip!r}: allowed are {sorted(CHIPS)}')
  if jax.default_backend() == 'tpu':
    raise RuntimeError('compiling for TPU is for machines without one')
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  try:
    return topologies.get_topology_desc(
        platform='tpu', topology_name=CHIPS[chip].topology
    ).devices
  except Exception as error:
    raise RuntimeError(
        f'no TPU compiler: {error}; pip install libtpu, of the release that'
        f' goes with jax {jax.__version__}'
    ) from error
