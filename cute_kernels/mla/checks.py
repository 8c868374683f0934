"""Checks of the arguments of MLA decode; errors name the argument, what came and what is wanted.

`dense_problem` and `sparse_problem` check shapes, dtypes, strides and devices, never values, so they do not wait for a
GPU. `check_dense_values` and `check_sparse_values` wait for it. They are for debug mode and the CPU.
"""

from __future__ import annotations

import torch

from cute_kernels.arguments import (
    TOKENS_OF_TABLE,
    Wanted,
    check_aligned,
    check_contiguous,
    check_dtype,
    check_flag,
    check_pages,
    check_shape,
    check_together,
    check_vector,
    check_wanted,
    checked_lengths,
    shape_of,
)
from cute_kernels.mla.formats import V_DIM, MlaFormat, format_of
from cute_kernels.mla.problem import CacheShape, DenseProblem, SparseExtras, SparseProblem
from cute_kernels.runtime.plans import ALIGNMENT

MAX_HEADS = 128
MAX_Q_LEN = 16
MAX_SLOTS = 2**31 - 1  # of a cache, so that an index is an int32
MAX_TOKENS = 2**31 - 2**16  # of a request: rounded up to whole tiles, they fit 32 bits


def dense_problem(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: object,
    causal: bool = True,
) -> DenseProblem:
    """Returns the problem of a call of `cute_kernels.mla.mla_decode`; raises TypeError or ValueError."""
    form = form_of(kv_format)
    tensors = {"q": q, "cache": cache, "block_table": block_table, "seq_lens": seq_lens}
    check_together(**tensors)
    check_flag("causal", causal)
    batch, q_len, _, head_dim = sizes = _check_query(q, form)
    if q_len > MAX_Q_LEN:
        raise ValueError(f"q: got q_len {q_len}, want 1 to {MAX_Q_LEN}")
    shape = cache_shape("cache", cache, form, head_dim)
    check_dtype("block_table", block_table, torch.int32)
    check_shape("block_table", block_table, batch, "max_pages", why=", a row a request")
    max_pages = block_table.shape[1]
    if max_pages * shape.page_size > MAX_TOKENS:
        raise ValueError(f"block_table: got {max_pages * shape.page_size} tokens a request, want at most {MAX_TOKENS}")
    if max_pages > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table: got strides {block_table.stride()}, want columns side by side")
    check_vector("seq_lens", seq_lens, torch.int32, batch, "the batch of q")
    return DenseProblem(
        q.dtype,
        *sizes,
        q.device,
        shape,
        max_pages=max_pages,
        table_stride=block_table.stride(0) if batch > 1 else max_pages,
        causal=causal and q_len > 1,
    )


def sparse_problem(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    kv_format: object,
    **optional: torch.Tensor | None,
) -> SparseProblem:
    """Returns the problem of a call of `cute_kernels.mla.sparse_mla_decode`; raises TypeError or ValueError.

    optional: fields of `SparseExtras`, by name.
    """
    form = form_of(kv_format)
    topk_length, sinks, extra_cache, extra_indices, extra_topk_length = SparseExtras(**optional)
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    tensors = {"q": q, "cache": cache, "indices": indices, **given}
    check_together(**tensors)
    batch, q_len, num_heads, head_dim = sizes = _check_query(q, form)
    shape = cache_shape("cache", cache, form, head_dim)
    topk = _check_indices("indices", indices, batch, q_len)
    if topk_length is not None:
        check_vector("topk_length", topk_length, torch.int32, batch, "the batch of q")
    if sinks is not None:
        check_vector("sinks", sinks, torch.float32, num_heads, "one for each query head")
    extra, extra_topk = None, 0
    if extra_cache is not None:
        if extra_indices is None:
            raise ValueError("extra_indices: got None with extra_cache, want the indices into it")
        extra = cache_shape("extra_cache", extra_cache, form, head_dim)
        extra_topk = _check_indices("extra_indices", extra_indices, batch, q_len)
        if extra_topk_length is not None:
            check_vector("extra_topk_length", extra_topk_length, torch.int32, batch, "the batch of q")
    for name in ("extra_indices", "extra_topk_length"):
        if extra is None and name in given:
            raise ValueError(f"{name}: got a tensor without extra_cache, want None")
    return SparseProblem(q.dtype, *sizes, q.device, shape, topk, extra, extra_topk)


# -- one argument ------------------------------------------------------------------------------------------------------


def form_of(kv_format: object) -> MlaFormat:
    """Returns the format called ``kv_format``; raises TypeError or ValueError if there is none."""
    if not isinstance(kv_format, str):
        raise TypeError(f"kv_format: got {kv_format!r}, want the name of a format")
    return format_of(kv_format)


def _check_query(q: torch.Tensor, form: MlaFormat) -> tuple[int, int, int, int]:
    check_shape("q", q, "batch", "q_len", "num_heads", "head_dim")
    check_contiguous("q", q)
    check_dtype("q", q, form.q_dtype, why=f" for {form.name}")
    batch, q_len, num_heads, head_dim = q.shape
    if head_dim not in form.head_dims:
        wanted = " or ".join(map(str, form.head_dims))
        raise ValueError(f"q: got head_dim {head_dim}, want {wanted} for {form.name}")
    if not 1 <= num_heads <= MAX_HEADS:
        raise ValueError(f"q: got {num_heads} heads, want 1 to {MAX_HEADS}")
    if q_len < 1:
        raise ValueError(f"q: got q_len {q_len}, want at least 1")
    return batch, q_len, num_heads, head_dim


def _check_indices(name: str, indices: torch.Tensor, batch: int, q_len: int) -> int:
    check_dtype(name, indices, torch.int32)
    check_shape(name, indices, batch, q_len, "topk", why=", for each query of q")
    check_contiguous(name, indices)
    return indices.shape[2]


def cache_shape(name: str, cache: torch.Tensor, form: MlaFormat, head_dim: int) -> CacheShape:
    """Returns a cache's shape and strides; raises TypeError or ValueError unless they fit the format ``form``."""
    check_shape(name, cache, "num_pages", "page_size", "row")
    check_dtype(name, cache, *form.cache_dtypes, why=f" for {form.name}")
    num_pages, page_size, row = cache.shape
    wanted_row = form.row_elements(head_dim)
    if row != wanted_row:
        raise ValueError(
            f"{name}: got rows of {row} elements, want {wanted_row} for {form.name} at head_dim {head_dim}"
        )
    if page_size == 0:
        raise ValueError(f"{name}: got pages without tokens in shape {shape_of(cache)}, want at least one")
    if num_pages * page_size > MAX_SLOTS:
        raise ValueError(f"{name}: got {num_pages * page_size} tokens, want at most {MAX_SLOTS}")
    # The stride of a dimension of size 1 says nothing.
    token_stride = cache.stride(1) if page_size > 1 else row
    page_stride = cache.stride(0) if num_pages > 1 else max(page_size * token_stride, 1)
    if cache.stride(2) != 1:
        raise ValueError(f"{name}: got strides {cache.stride()}, want rows contiguous: a last stride of 1")
    if token_stride < row or (not form.is_dense and token_stride != row):
        what = f"tokens {row} elements apart or more" if form.is_dense else f"a page's tokens {row} bytes apart"
        raise ValueError(f"{name}: got strides {cache.stride()}, want {what}")
    if page_stride < (page_size - 1) * token_stride + row:
        raise ValueError(f"{name}: got strides {cache.stride()}, want pages that do not overlap")
    width = cache.element_size()
    return CacheShape(form, num_pages, page_size, page_stride * width, token_stride * width)


def check_out(out: object, problem: DenseProblem | SparseProblem) -> None:
    """Raises TypeError or ValueError unless ``out`` can take the result."""
    why = ", that of q", f": q's, with {V_DIM} columns"
    check_wanted([Wanted("out", out, (problem.q_dtype,), problem.out_shape, problem.device, "q", *why, True)])


def check_alignment(problem: DenseProblem | SparseProblem, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless caches, q and out are aligned for the kernels' 16-byte accesses."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_aligned(name, tensor, ALIGNMENT)
    for name, shape in (("cache", problem.cache), ("extra_cache", getattr(problem, "extra", None))):
        if shape is not None:
            check_distances(name, shape, ALIGNMENT)


def check_distances(name: str, shape: CacheShape, unit: int) -> None:
    """Raises ValueError unless a cache's pages and tokens are multiples of ``unit`` bytes apart."""
    strides = {"pages": (shape.num_pages, shape.page_stride)}
    if not shape.form.split_pages:
        strides["tokens"] = (shape.page_size, shape.token_stride)
    for what, (count, stride) in strides.items():
        if count > 1 and stride % unit:
            raise ValueError(f"{name}: got {what} {stride} bytes apart, want a multiple of {unit} bytes")


# -- values ------------------------------------------------------------------------------------------------------------


def check_dense_values(problem: DenseProblem, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Raises ValueError if a length is out of range or a page is outside the cache. The message names the request, and
    a page's position in the block table. Waits for the device."""
    lengths, page_size = checked_lengths(seq_lens, problem.max_seq_len, TOKENS_OF_TABLE), problem.cache.page_size
    first = torch.arange(problem.max_pages, device="cpu") * page_size  # token of each entry
    check_pages(block_table.cpu(), first < lengths[:, None], page_size, problem.cache.num_pages)


def check_sparse_values(name: str, shape: CacheShape, indices: torch.Tensor, length: torch.Tensor | None) -> None:
    """Raises ValueError if a length is out of range, or if an index that is used is neither -1 nor in the cache.

    The message names the request, and an index's query and position. Waits for the device. name: "indices" or
    "extra_indices", for the message.
    """
    values = indices.cpu()
    counted = torch.ones_like(values, dtype=torch.bool)
    if length is not None:
        lengths, topk = length.cpu(), values.shape[2]
        wrong = torch.nonzero((lengths < 0) | (lengths > topk))
        if wrong.numel():
            request = int(wrong[0])
            whose = name.replace("indices", "topk_length")
            raise ValueError(f"{whose}: got {int(lengths[request])} for request {request}, want 0 to {topk}")
        counted = (torch.arange(topk, device="cpu") < lengths[:, None, None]).expand_as(values)
    wrong = torch.nonzero(counted & ((values < -1) | (values >= shape.num_slots)))
    if wrong.numel():
        request, query, position = wrong[0].tolist()
        raise ValueError(
            f"{name}: got {int(values[request, query, position])} for request {request}, query {query}, position "
            f"{position}, want -1 or 0 to {shape.num_slots - 1}, the cache's tokens"
        )
