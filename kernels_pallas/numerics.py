"""The rules that make a forward pass equal to the bit in any program.

XLA may sum a row in any order and may contract `a * b + c` into one rounding;
both choices depend on what else is fused into the kernel. So the forward uses

  * `tree_sum`, a halving tree of plain additions, never an add-reduction;
  * `keep(a * b) + c`, which forbids the contraction;
  * matrix products on row tiles of one height (`ROW_TILE`; of experts'
    products `grouped_matmul.GROUP_TILE`);
  * `cast` at every place where a value is stored in low precision;
  * `compiler_options` on every `jit` that runs the forward.

`Numerics(exact=False)` is the control arm: the same code with free tiles,
XLA's own reductions and default fusion. It exists to show that the checks can
fail and to measure what exactness costs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from typing import Any, Iterator

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax

# Height of every dense matrix product. On CPU the kernels take six rows at a
# time (AVX2) or eight (AVX-512); AVX2 sums a rest of two in another order, which
# forbids heights such as 32 and 128.
ROW_TILE = 64
F32 = jnp.float32

CPU_OPTIONS = {
    # YNN fusion picks the inner kernel by the shape of the whole product.
    'xla_cpu_experimental_ynn_fusion_type': '',
    # Threads that share a product cut its rows where their number says.
    'xla_cpu_multi_thread_eigen': False,
}

_TARGET: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    'target', default=None
)


def platform() -> str:
  """Returns what programs are made for: 'cpu', 'gpu' or 'tpu'."""
  return _TARGET.get() or jax.default_backend()


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
  """Within it, programs are lowered for another platform than this machine's.

  Args:
    name: 'cpu', 'gpu' or 'tpu'.
  """
  token = _TARGET.set(name)
  try:
    yield
  finally:
    _TARGET.reset(token)


def interpret() -> bool:
  """Whether Pallas kernels are interpreted: True on CPU alone."""
  return platform() == 'cpu'


@jax.custom_jvp
def _keep(x):
  return jnp.maximum(x, -3e38)


_keep.defjvp(lambda primals, tangents: (_keep(primals[0]), tangents[0]))


PRECISIONS = ('float32', 'bfloat16', 'fp8')


@dataclasses.dataclass(frozen=True)
class Numerics:
  """How numbers are rounded and summed; static in every program.

  Attributes:
    dtype: 'float32' or 'bfloat16', the precision of activations and weights;
      'fp8' is 'bfloat16' whose layers multiply numbers of 8 bits.
    exact: False only in the control arm.

  Raises:
    ValueError: if dtype is not one of the three.
  """

  dtype: str = 'float32'
  exact: bool = True

  def __post_init__(self):
    if self.dtype not in PRECISIONS:
      raise ValueError(
          f"dtype={self.dtype!r}: allowed are 'float32', 'bfloat16' and 'fp8'"
      )

  @property
  def quantized(self) -> bool:
    """True if the layers' matrix products take `fp8_matmul`'s operands."""
    return self.dtype == 'fp8'

  @property
  def emulated(self) -> bool:
    """True where bfloat16 values are held in float32 arrays (on CPU)."""
    return self.dtype != 'float32' and platform() == 'cpu'

  @property
  def storage(self) -> Any:
    """The array dtype of activations, weights and KV pages."""
    if self.dtype == 'float32' or self.emulated:
      return jnp.float32
    return jnp.bfloat16

  def cast(self, x):
    """Rounds to `dtype`; on CPU bfloat16 stays in a float32 array."""
    if self.dtype == 'float32':
      return x.astype(F32)
    if self.emulated:
      return lax.reduce_precision(x, 8, 7)
    return x.astype(jnp.bfloat16)

  def keep(self, x):
    """Returns x, opaque to the contraction of a*b+c; derivative 1."""
    return _keep(x) if self.exact else x

  def tree_sum(self, x):
    """Sums the last axis by a halving tree over a zero-padded power of two.

    Args:
      x: [..., n], n fixed by the model and never by the batch.

    Returns:
      [...], the sum.
    """
    if not self.exact:
      return x.sum(-1)
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    if size != n:
      x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - n)])
    while size > 1:
      size //= 2
      x = x[..., :size] + x[..., size:]
    return x[..., 0]

  def tanh(self, x):
    """tanh from one exponential: XLA's own differs with the place in a vector.

    Args:
      x: float32.

    Returns:
      float32, off by at most 1e-7.
    """
    if not self.exact:
      return jnp.tanh(x)
    size = jnp.abs(x)
    e = jnp.exp(-2 * size)
    # Near zero 1 - e loses its digits, and x - x³/3 is all there is.
    small = size - self.keep(self.keep(size * size) * self.keep(size / 3))
    out = jnp.where(size < 1e-2, small, (1 - e) / (1 + e))
    return jnp.where(x < 0, -out, out)

  def dot(self, x, w, dims):
    """`lax.dot_general` accumulated in float32 at the highest precision."""
    # Products of two bfloat16 numbers are exact in float32 as they are.
    exact = x.dtype == w.dtype == jnp.bfloat16
    return lax.dot_general(
        x,
        w,
        dims,
        precision=lax.Precision.DEFAULT if exact else lax.Precision.HIGHEST,
        preferred_element_type=F32,
    )


def compiler_options(exact: bool = True) -> dict[str, Any]:
  """Returns the compiler options that every exact program needs.

  Raises:
    RuntimeError: on CPU, if this jaxlib does not know an option that exactness
      needs.
  """
  return _cpu_options() if exact and platform() == 'cpu' else {}


@functools.cache
def _cpu_options() -> dict[str, Any]:
  try:
    jax.jit(lambda x: x + 1, compiler_options=CPU_OPTIONS)(jnp.zeros(()))
  except Exception as error:
    raise RuntimeError(
        f'this jaxlib ({jax.__version__}) rejects one of the compiler options'
        f' {sorted(CPU_OPTIONS)}, without which log-probs are not equal to the'
        ' bit; use jax>=0.10.2'
    ) from error
  return dict(CPU_OPTIONS)


def jit(fun, *, exact: bool = True, **kwargs):
  """`jax.jit` with the options that keep the forward exact."""
  return jax.jit(fun, compiler_options=compiler_options(exact), **kwargs)


def choose(impl: str, table: dict[str, Any], op: str):
  """Returns the implementation of an op.

  Args:
    impl: a key of the table, or 'auto': 'pallas' on TPU where the op has it,
      else 'xla'. What 'auto' chose is logged once.
    table: implementations by name. That of 'pallas' is for TPU, or a dict with
      the keys 'tpu' and 'gpu'; on CPU the one for TPU is interpreted.
    op: for messages.

  Raises:
    ValueError: if `impl` is not offered for this op, or not on this platform.
  """
  name = impl
  if impl == 'auto':
    name = 'pallas' if platform() == 'tpu' and 'pallas' in table else 'xla'
    _log_choice(op, name, platform())
  if name not in table:
    raise ValueError(
        f'impl={impl!r} of {op}: allowed are {["auto", *sorted(table)]}'
    )
  found = table[name]
  if name == 'pallas':
    kernels = found if isinstance(found, dict) else {'tpu': found}
    where = 'gpu' if platform() == 'gpu' else 'tpu'
    if where not in kernels:
      raise ValueError(
          f"impl='pallas' of {op} on {where}: allowed are 'auto' and 'xla'"
      )
    found = kernels[where]
  return found


@functools.cache
def _log_choice(op: str, name: str, where: str) -> None:
  logging.info("%s: impl='auto' is %r on %s", op, name, where)
