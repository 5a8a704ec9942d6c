"""Block selection: which past pages a token and KV head attend to.

Source: MoBA (arXiv:2502.13189 eq. 5-6) and NSA (arXiv:2502.11089 §3.3.2). Here
the score of a page is summed over the query heads of a KV group and the current
page is always attended besides the selected ones, so the mean of an unfinished
page is never used.
"""

from __future__ import annotations

from kernels_pallas import numerics as nx
from kernels_pallas.block_selection import pallas_gpu
from kernels_pallas.block_selection import pallas_tpu
from kernels_pallas.block_selection import reference
from kernels_pallas.block_selection import xla

IMPLS = {
    'xla': xla,
    'pallas': {'tpu': pallas_tpu, 'gpu': pallas_gpu},
    'reference': reference,
}


def page_means(kv_MCKh, *, numerics: nx.Numerics, impl: str = 'auto'):
  """mean_m = 1/C Σ_c k_mc, the representative of each page.

  Args:
    kv_MCKh: [M, C, K, 2H] pages, keys in the first H columns.
    numerics: summation rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    float32 [M, K, H]; meaningless for pages that are not full.

  Raises:
    ValueError: if the pages are not [M, C, K, 2H].
  """
  if kv_MCKh.ndim != 4 or kv_MCKh.shape[3] % 2:
    raise ValueError(f'kv_MCKh {kv_MCKh.shape}: expected [M, C, K, 2H]')
  fun = nx.choose(impl, IMPLS, 'page_means').page_means
  return fun(kv_MCKh, numerics)


def select_pages(
    q_TNH, means_MKH, layout, *, page_size, topk, numerics, impl='auto'
):
  """Chooses the `topk` strictly past pages with the highest q · mean.

  Args:
    q_TNH: [T, N, H] query stream.
    means_MKH: float32 [M, K, H] from `page_means`, by pool page.
    layout: `paged_attention.ops.Layout` of the stream.
    page_size: C.
    topk: pages per token and KV head, at least 1.
    numerics: rounding and summation rules.
    impl: 'auto', 'xla', 'pallas' or 'reference'.

  Returns:
    int32 [T, K, topk] page numbers within the sequence, by falling score and
    then by position, -1 where fewer pages lie in the past.

  Raises:
    ValueError: if topk < 1, page_size < 1 or the heads do not fit.
  """
  if topk < 1:
    raise ValueError(f'topk={topk}: at least 1 is needed')
  if page_size < 1:
    raise ValueError(f'page_size={page_size}: at least 1 is needed')
  if (
      q_TNH.ndim != 3
      or means_MKH.ndim != 3
      or q_TNH.shape[1] % means_MKH.shape[1]
      or q_TNH.shape[2] != means_MKH.shape[2]
  ):
    raise ValueError(
        f'q_TNH {q_TNH.shape} and means_MKH {means_MKH.shape}: expected'
        ' [T, N, H] and [M, K, H], N a multiple of K'
    )
  fun = nx.choose(impl, IMPLS, 'select_pages').select_pages
  return fun(q_TNH, means_MKH, layout.of_pool(), page_size, topk, numerics)
