"""How kernels for Hopper GPUs are launched.

A warpgroup is four warps that hold arrays in their registers together and feed
the tensor core; a block has one or a few.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import numerics as nx

REDUCED = 8  # columns that four threads hold together


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


def keep(x):
  """`Numerics.keep`; both LLVM and ptxas contract, even across a barrier."""
  return jnp.maximum(x, -3e38)


def wide(x, width: int):
  """Repeats a number of each row along it, [R] -> [R, width]."""
  return lax.broadcast_in_dim(x, (x.shape[0], width), (0,))


def row_sums(x):
  """Sums rows [R, C] by a halving tree -> [R].

  The last columns lie in the registers of four threads, which add them in an
  order of their own, the same for every row.
  """
  while x.shape[1] > REDUCED:
    half = x.shape[1] // 2
    x = x[:, :half] + x[:, half:]
  return nx.Numerics().tree_sum(x) if nx.interpret() else x.sum(1)


def times_transposed(x_ref, y_ref):
  """Returns x yᵀ in float32, both in shared memory."""
  if nx.interpret():  # which does not know transposed tiles
    return _dot(x_ref[...], y_ref[...], (((1,), (1,)), ((), ())))

  def run(acc):
    plgpu.wgmma(acc, x_ref, plgpu.transpose_ref(y_ref, (1, 0)))
    return acc[...]

  shape = x_ref.shape[0], y_ref.shape[0]
  return pl.run_scoped(run, plgpu.ACC(shape, nx.F32))


def add_product(total, x, y_ref):
  """Returns total + x y in float32, x in registers, y in shared memory."""
  if nx.interpret():  # which does not know factors in registers
    return total + _dot(x, y_ref[...], (((1,), (0,)), ((), ())))

  def run(acc):
    plgpu.wgmma(acc, x, y_ref)
    plgpu.wgmma_wait(0)

  return pl.run_state(run)(plgpu.ACC.init(total))


def _dot(x, y, dims):
  return lax.dot_general(x, y, dims, preferred_element_type=nx.F32)


@dataclasses.dataclass(frozen=True)
class Ring:
  """Slots of shared memory that one warpgroup fills and the others read.

  Attributes:
    stages: how many there are.
    there: barriers, one a slot: it is filled.
    free: barriers, one a slot: all readers have done with it.
  """

  stages: int
  there: Any
  free: Any

  def fill(self, count, copy: Callable[[Any, Any, Any], None]) -> None:
    """Starts copy(i, slot, barrier) for i in 0..count-1, as slots get free."""

    @pl.loop(0, count)
    def _(i):
      slot = lax.rem(i, self.stages)

      @pl.when(i >= self.stages)
      def _():
        plgpu.barrier_wait(self.free.at[slot])

      copy(i, slot, self.there.at[slot])

  def read(self, i, count, step: Callable[[Any], Any]):
    """Returns step(slot) of the i-th of `count` fillings, and frees its slot."""
    slot = lax.rem(i, self.stages)
    plgpu.barrier_wait(self.there.at[slot])
    out = step(slot)

    # The last copies wait for nothing.
    @pl.when(i + self.stages < count)
    def _():
      plgpu.barrier_arrive(self.free.at[slot])

    return out


def _interpreter():
  # Not among the public names of this release.
  from jax._src.pallas.mosaic_gpu.interpret import params

  return params.InterpretGPUParams()
