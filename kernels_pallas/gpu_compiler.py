"""Compiles for GPU on a machine that has none.

The compiler is in the wheels of JAX's CUDA plugin and of ptxas, beside a JAX of
the same release (about 230 MB, no driver):

  pip install --no-deps jax-cuda12-pjrt==VERSION jax-cuda12-plugin==VERSION
  pip install --no-deps 'nvidia-cuda-nvcc-cu12>=12.9.86,<13' \
      'nvidia-cuda-runtime-cu12<13'

A virtual environment of its own is best, and `JAX_PLATFORMS=cpu` is needed:
otherwise the plugin looks for a GPU and gives up. Source:
`jax.experimental.topologies`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import tempfile
from typing import Any, Callable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import topologies

from kernels_pallas import numerics as nx


@dataclasses.dataclass(frozen=True)
class Chip:
  """A GPU.

  Attributes:
    name: of the device.
    capability: compute capability.
    cores: streaming multiprocessors.
    clock_hz: cycles per second, boosted.
    bf16_flops: peak per second, dense.
    hbm_bytes: bandwidth of the device memory per second.
    memory_bytes: size of the device memory.
    l2_bytes: size of the second-level cache.
    smem_bytes: shared memory that one block may use.
  """

  name: str
  capability: tuple[int, int]
  cores: int
  clock_hz: float
  bf16_flops: float
  hbm_bytes: float
  memory_bytes: int
  l2_bytes: int
  smem_bytes: int

  @property
  def description(self) -> str:
    """What XLA wants to know of a GPU, a text-format protocol buffer."""
    major, minor = self.capability
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {self.cores}
          clock_rate_ghz: {self.clock_hz / 1e9}
          memory_bandwidth: {int(self.hbm_bytes)}
          device_memory_size: {self.memory_bytes}
          l2_cache_size: {self.l2_bytes}
          shared_memory_per_block: {48 << 10}
          shared_memory_per_block_optin: {self.smem_bytes}
          shared_memory_per_core: {self.smem_bytes + 1024}
          registers_per_block_limit: 65536
          registers_per_core_limit: 65536
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          fpus_per_core: {128 if major >= 9 else 64}
          block_dim_limit_x: {2**31 - 1}
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        runtime_version {{ major: 12 minor: 9 }}
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{self.name}"
    """


CHIPS = {
    'h100': Chip(
        name='NVIDIA H100 80GB HBM3',
        capability=(9, 0),
        cores=132,
        clock_hz=1.98e9,
        bf16_flops=989.4e12,
        hbm_bytes=3350e9,
        memory_bytes=80 << 30,
        l2_bytes=50 << 20,
        smem_bytes=227 << 10,
    ),
    # Has no wgmma: XLA's programs compile, our Pallas kernels do not.
    'a100': Chip(
        name='NVIDIA A100-SXM4-80GB',
        capability=(8, 0),
        cores=108,
        clock_hz=1.41e9,
        bf16_flops=312e12,
        hbm_bytes=2039e9,
        memory_bytes=80 << 30,
        l2_bytes=40 << 20,
        smem_bytes=163 << 10,
    ),
}

# Autotuning would need the device.
_OPTIONS = {'xla_gpu_autotune_level': '0'}

# Mosaic GPU leaves what ptxas says of each kernel in this folder.
_DUMP = 'MOSAIC_GPU_DUMP_TO'


@dataclasses.dataclass(frozen=True)
class Resources:
  """What a kernel takes, from its PTX and from ptxas.

  Attributes:
    registers: of a thread.
    spill_bytes: that a thread stores to and loads from local memory because
      registers do not suffice.
    fused: multiply-adds of one rounding in its PTX, written or contracted.
  """

  registers: int
  spill_bytes: int
  fused: int


def compile_for(
    fun: Callable[..., Any], args: Sequence[Any], chip: str
) -> jax.stages.Compiled:
  """Compiles `fun` for one GPU.

  Args:
    fun: the function.
    args: `jax.ShapeDtypeStruct`s.
    chip: key of `CHIPS`.

  Raises:
    ValueError: on an unknown chip.
    RuntimeError: if the compiler is not installed.
    Exception: of the compiler, if it refuses the program.
  """
  mesh = jax.sharding.Mesh(np.array(_devices(chip)[:1]), ('x',))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with jax.set_mesh(mesh), nx.target('gpu'):
    lowered = jax.jit(fun, in_shardings=whole).lower(*args)
    return lowered.compile(compiler_options=_OPTIONS)


def compile_and_count(
    fun: Callable[..., Any], args: Sequence[Any], chip: str
) -> tuple[jax.stages.Compiled, dict[str, Resources]]:
  """Compiles `fun`, and says what its Pallas kernels take.

  Args:
    fun: the function.
    args: `jax.ShapeDtypeStruct`s.
    chip: key of `CHIPS`.

  Returns:
    The program, and the resources of its kernels by name. A kernel that this
    process has compiled before, at the same shapes, is not among them: it is
    not compiled again.

  Raises:
    ValueError, RuntimeError, Exception: as `compile_for`.
  """
  with tempfile.TemporaryDirectory() as folder, _dump(folder):
    compiled = compile_for(fun, args, chip)
    found = {}
    for path in sorted(pathlib.Path(folder).glob('*.ptxas')):
      ptx = path.with_suffix('.ptx').read_text()
      found[path.stem] = _parse(path.read_text(), ptx)
  return compiled, found


def _devices(chip: str) -> Sequence[Any]:
  if chip not in CHIPS:
    raise ValueError(f'chip={chip!r}: allowed are {sorted(CHIPS)}')
  try:
    return topologies.get_topology_desc(
        'gpu',
        'cuda',
        target_config=CHIPS[chip].description,
        topology='1x1x1',
    ).devices
  except Exception as error:
    version = jax.__version__
    raise RuntimeError(
        f'no GPU compiler: {error}; JAX_PLATFORMS=cpu and pip install --no-deps'
        f' jax-cuda12-pjrt=={version} jax-cuda12-plugin=={version}'
        " 'nvidia-cuda-nvcc-cu12>=12.9.86,<13' 'nvidia-cuda-runtime-cu12<13'"
    ) from error


@contextlib.contextmanager
def _dump(folder: str) -> Iterator[None]:
  before = os.environ.get(_DUMP)
  cached = jax.config.jax_enable_compilation_cache
  os.environ[_DUMP] = folder
  jax.config.update('jax_enable_compilation_cache', False)
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', cached)
    if before is None:
      del os.environ[_DUMP]
    else:
      os.environ[_DUMP] = before


def _parse(text: str, ptx: str) -> Resources:
  registers = [int(n) for n in re.findall(r'Used (\d+) registers', text)]
  spills = [int(n) for n in re.findall(r'(\d+) bytes spill', text)]
  if not registers or not spills:
    raise RuntimeError(f'ptxas says nothing of registers or spills: {text}')
  return Resources(max(registers), sum(spills), ptx.count('fma.rn.f32'))
