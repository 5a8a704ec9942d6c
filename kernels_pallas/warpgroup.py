"""How kernels for Hopper GPUs are launched.

A warpgroup is four warps that hold arrays in their registers together and feed
the tensor core; a block has one or a few.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import numerics as nx


def kernel(
    fun: Callable[..., None],
    *,
    name: str,
    grid: dict[str, int],
    out: Any,
    scratch: Sequence[Any] = (),
    warpgroups: int | None = None,
):
  """Returns a callable that launches `fun` on every point of a grid.

  Args:
    fun: of the references to inputs, outputs and scratch memory.
    name: of the kernel in profiles.
    grid: size of each axis, the slowest first.
    out: `jax.ShapeDtypeStruct`s of the outputs.
    scratch: shared memory and barriers.
    warpgroups: of a block, along the axis 'warpgroups'; None for one.
  """

  def body(*refs):
    fun(*refs)

  body.__name__ = body.__qualname__ = name
  return plgpu.kernel(
      body,
      out_type=out,
      scratch_types=scratch,
      grid=tuple(grid.values()),
      grid_names=tuple(grid),
      num_threads=warpgroups,
      thread_name=None if warpgroups is None else 'warpgroups',
      compiler_params=plgpu.CompilerParams(
          lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
          reduction_scratch_bytes=0,  # no reduction crosses warps
      ),
      interpret=_interpreter() if nx.interpret() else None,
  )


def load(ref, *index):
  """Returns numbers of an array in memory, in any layout of registers."""
  if nx.interpret():  # which does not know `plgpu.load`
    return ref[index]
  return plgpu.load(ref, index, optimized=False)


def _interpreter():
  # Not among the public names of this release.
  from jax._src.pallas.mosaic_gpu.interpret import params

  return params.InterpretGPUParams()
