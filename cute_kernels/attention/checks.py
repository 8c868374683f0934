"""Checks of the arguments of decode attention; errors name the argument, what came and what is wanted.

Each function checks one argument, and never waits for a GPU. :func:`cute_kernels.attention.call.make_call` calls all of
them. :func:`cute_kernels.attention.device_values.check_device_values` checks values on the device, so it waits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cute_kernels import arguments
from cute_kernels.arguments import Wanted
from cute_kernels.attention.decode_config import RECIPROCAL_BITS
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import HEAD_DIMS, KvFormat, format_of, format_pair
from cute_kernels.runtime.plans import ALIGNMENT
from layouts.kv.channel_blocks import TAIL_TOKENS

Q_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
BIAS_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
CACHE_LAYOUTS = ("NHD", "HND")
MAX_Q_LEN = 16
MAX_BATCH = 65535  # the grid's third dimension
MAX_SPLITS = 65535  # times the tokens of a tile, they fit 32 bits
MAX_TOKENS = 2**31 - 2**16  # of a request: rounded up to whole tiles, they fit 32 bits
PAGE_SIZES = range(16, 257, 16)
WORD = 4  # bytes, of rows that carry their scales
CACHES = ("k_cache", "v_cache")


# -- the operands ------------------------------------------------------------------------------------------------------


def check_formats(kv_format: object) -> tuple[KvFormat, KvFormat]:
    """Returns K's and V's format. Raises ValueError for an unknown name; the message lists the known names."""
    k_name, v_name = format_pair(kv_format)
    return format_of(k_name), format_of(v_name)


def check_query(q: torch.Tensor, forms: tuple[KvFormat, KvFormat]) -> None:
    """Raises TypeError or ValueError unless attention over caches in ``forms`` can take q."""
    if q.dim() != 4:
        raise ValueError(f"q: got {q.dim()} dimensions, want 4: [batch, q_len, num_q_heads, head_dim]")
    arguments.check_dtype("q", q, *Q_DTYPES)
    for form in forms:
        if not form.fits(q.dtype):
            raise TypeError(f"q: got dtype {q.dtype}, want {form.cache_dtype}, that of a {form.name} cache")
    batch, q_len, num_q_heads, head_dim = q.shape
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"q: got q_len {q_len}, want 1 to {MAX_Q_LEN}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q: got head_dim {head_dim}, want one of {', '.join(map(str, HEAD_DIMS))}")
    if batch > MAX_BATCH:
        raise ValueError(f"q: got a batch of {batch}, want at most {MAX_BATCH}")
    if num_q_heads == 0:
        raise ValueError("q: got no query heads, want at least one per KV head")
    check_query_strides(q, "requests and queries")


def check_query_strides(q: torch.Tensor, what: str) -> None:
    """Raises ValueError unless the heads of a position are contiguous and positions begin at multiples of 16 bytes.
    what: how messages name q's other dimensions.
    """
    if q.is_contiguous() or not q.numel():
        return
    *others, head, column = arguments.strides_of(q)
    found = f"q: got strides {q.stride()} for shape {arguments.shape_of(q)}"
    if column != 1 or head != q.shape[-1]:
        raise ValueError(f"{found}, want the last two dimensions contiguous")
    if any(stride * q.element_size() % ALIGNMENT for stride in others):
        raise ValueError(f"{found}, want {what} on multiples of {ALIGNMENT} bytes")


def check_layout(cache_layout: object) -> None:
    if cache_layout not in CACHE_LAYOUTS:
        raise ValueError(f"cache_layout: got {cache_layout!r}, want {' or '.join(map(repr, CACHE_LAYOUTS))}")


def check_cache(name: str, cache: torch.Tensor, form: KvFormat, dimensions: str) -> None:
    """Raises TypeError or ValueError unless a cache has four dimensions, a dtype of its format, and strides that copies
    support."""
    if cache.dim() != 4:
        raise ValueError(f"{name}: got {cache.dim()} dimensions, want 4: {dimensions}")
    arguments.check_dtype(name, cache, *form.cache_dtypes, why=f" for {form.name}")
    if not cache.is_contiguous() and cache.numel():
        _check_cache_strides(name, cache, form, dimensions)


def _check_cache_strides(name: str, cache: torch.Tensor, form: KvFormat, dimensions: str) -> None:
    """Raises ValueError unless rows are contiguous, have the alignment that copies need, and do not overlap.

    Rows that carry their scales begin on multiples of 4 bytes, others on multiples of 16. Blocks lie less than 2**40
    bytes apart, tokens and heads less than 2**31.
    """
    found = f"{name}: got strides {cache.stride()} for shape {arguments.shape_of(cache)} {dimensions}"
    strides, size = arguments.strides_of(cache), cache.element_size()
    if strides[3] != 1:
        raise ValueError(f"{found}, want rows contiguous: a last stride of 1")
    unit = WORD if form.has_header else ALIGNMENT
    if any(stride * size % unit for stride in strides[:3]):
        raise ValueError(f"{found}, want rows of {form.name} on multiples of {unit} bytes")
    if arguments.overlaps(cache):
        raise ValueError(f"{found}, want rows that do not overlap")
    if strides[0] * size >= 2**40 or max(strides[1:3]) * size >= 2**31:
        raise ValueError(f"{found}, want blocks less than 2**40 bytes apart, tokens and heads less than 2**31")


def check_alike(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raises ValueError unless the shapes of two caches agree in all but the last dimension."""
    if v_cache.shape[:3] != k_cache.shape[:3]:
        wanted = f"that of k_cache, {arguments.shape_of(k_cache)}, in all but the last dimension"
        raise ValueError(f"v_cache: got shape {arguments.shape_of(v_cache)}, want {wanted}")


def check_heads(q_len: int, num_q_heads: int, num_kv_heads: int) -> None:
    """Raises ValueError if a call has too many queries or heads for decode attention's kernel.

    The kernel divides by multiplying with a reciprocal of `RECIPROCAL_BITS` bits: rows of queries and query heads by
    the query heads of a KV head, and indices of CTAs by the CTAs of a KV head. The quotient is exact while dividend
    times divisor is below 2**RECIPROCAL_BITS. The bound on q_len * num_q_heads**2 / num_kv_heads ensures this for all
    three, since a CTA has room for at least 8 rows of a KV head's queries. The bound on KV heads keeps the
    multiplication within 32 bits.
    """
    most, most_heads = 1 << RECIPROCAL_BITS, 1 << 31 - RECIPROCAL_BITS
    if q_len * num_q_heads**2 > most * num_kv_heads or num_kv_heads > most_heads:
        wanted = f"q_len * num_q_heads**2 / num_kv_heads of at most {most}, and at most {most_heads} KV heads"
        raise ValueError(f"q: got q_len {q_len}, {num_q_heads} query heads, {num_kv_heads} KV heads, want {wanted}")


def check_row(name: str, cache: torch.Tensor, form: KvFormat, head_dim: int) -> None:
    """Raises ValueError unless rows of a cache have as many elements as its format needs."""
    found, row = cache.shape[3], form.row_elements(head_dim)
    if found != row:
        raise ValueError(f"{name}: got rows of {found} elements, want {row} for {form.name} at head_dim {head_dim}")


def head_dim_of_row(form: KvFormat, row: int) -> int:
    """Returns the head_dim whose rows have ``row`` elements; there has to be one. ``row`` may be symbolic."""
    header = form.row_elements(0)  # row sizes are a header and a multiple of head_dim
    return (row - header) * HEAD_DIMS[0] // (form.row_elements(HEAD_DIMS[0]) - header)


def check_value_rows(v_cache: torch.Tensor, form: KvFormat) -> int:
    """Returns the head_dim of V, which follows from the size of its rows; raises ValueError if no head_dim has such
    rows."""
    row = v_cache.shape[3]
    for head_dim in HEAD_DIMS:
        if form.row_elements(head_dim) == row:
            return head_dim
    rows = ", ".join(str(form.row_elements(head_dim)) for head_dim in HEAD_DIMS)
    dims = ", ".join(map(str, HEAD_DIMS))
    raise ValueError(f"v_cache: got rows of {row} elements, want one of {rows} for {form.name} at head_dim {dims}")


def check_readable(name: str, form: KvFormat, head_dim: int) -> None:
    """Raises ValueError if no kernel reads ``form`` at ``head_dim``, even for CPU tensors."""
    reason = cannot_read(form, head_dim)
    if reason is not None:
        raise ValueError(f"kv_format: got {form.name} for {name}, want a format that is read at its head_dim: {reason}")


def check_blocks(forms: tuple[KvFormat, KvFormat], page_size: int | None) -> None:
    """Raises ValueError if V's format has blocks of tokens, or if K's has them and a page does not hold whole blocks.
    page_size: None for contiguous caches."""
    keys, values = forms
    if values.in_blocks:
        raise ValueError(f"kv_format: got {values.name} for v_cache, which is for keys alone; want a format of rows")
    if keys.in_blocks and page_size is not None and page_size % keys.block_tokens:
        raise ValueError(
            f"k_cache: got pages of {page_size} tokens, want a multiple of {keys.block_tokens} for {keys.name}: a page "
            "holds whole blocks"
        )


def check_tail(
    form: KvFormat, rows: torch.Tensor | None, slots: torch.Tensor | None, batch: int, heads: tuple[int, int]
) -> None:
    """Raises TypeError or ValueError unless k_tail (``rows``) and tail_slots (``slots``) fit K's format. Keys in blocks
    of tokens need both; other formats need None. heads: (KV heads, head_dim)."""
    wanted = {
        "k_tail": (rows, f"fp16 [slots, {TAIL_TOKENS}, {heads[0]}, {heads[1]}], where the newest keys wait,"),
        "tail_slots": (slots, f"int32 [{batch}], a slot of k_tail for each request,"),
    }
    for name, (tensor, what) in wanted.items():
        if (tensor is None) == form.in_blocks:
            found, want = ("None", what) if tensor is None else ("a tensor", "None")
            raise ValueError(f"{name}: got {found}, want {want} for {form.name} keys")
    if rows is None or slots is None:
        return
    arguments.check_vector("tail_slots", slots, torch.int32, batch, "a slot of k_tail for each request")
    arguments.check_dtype("k_tail", rows, torch.float16)
    arguments.check_shape("k_tail", rows, "slots", TAIL_TOKENS, *heads)
    arguments.check_contiguous("k_tail", rows)


def check_block_table(block_table: torch.Tensor, batch: int, num_pages: int, page_size: int) -> None:
    """Raises TypeError or ValueError unless the table is int32 [batch, max_pages] with contiguous columns. Also raises
    ValueError for a cache without pages, or with pages of a size that kernels do not support."""
    arguments.check_dtype("block_table", block_table, torch.int32)
    arguments.check_shape("block_table", block_table, batch, "max_pages", why=", a row for each request of q")
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table: got strides {block_table.stride()}, want columns side by side")
    if block_table.shape[0] > 1 and block_table.stride(0) >= 2**31:
        raise ValueError(f"block_table: got strides {block_table.stride()}, want rows less than 2**31 entries apart")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"k_cache: got pages of {page_size} tokens, want a multiple of 16 from 16 to 256")
    if num_pages == 0 and block_table.numel():
        raise ValueError("k_cache: got no pages, want at least one")


def check_given_scale(
    name: str, scale: torch.Tensor | None, form: KvFormat, num_kv_heads: int, head_dim: int
) -> tuple[int, int] | None:
    """Returns a given scale's strides in elements, (from head to head, from column to column), or None if no scale is
    given.

    Raises TypeError or ValueError unless the scale fits the format: fp32 [] or [1] ("tensor"), [num_kv_heads] or
    [num_kv_heads, 1] ("head"), [num_kv_heads, head_dim] ("channel"), or None for a format without such a scale.
    """
    if form.given_scale is None:
        if scale is not None:
            arguments.check_tensors(**{name: scale})
            raise ValueError(
                f"{name}: got a tensor of shape {arguments.shape_of(scale)}, want None: {form.name} has no such scale"
            )
        return None
    shapes = {
        "tensor": ([], [1]),
        "head": ([num_kv_heads], [num_kv_heads, 1]),
        "channel": ([num_kv_heads, head_dim],),
    }[form.given_scale]
    wanted = f"{' or '.join(map(str, shapes))} for {form.name}"
    if scale is None:
        raise ValueError(f"{name}: got None, want torch.float32 {wanted}")
    arguments.check_tensors(**{name: scale})
    arguments.check_dtype(name, scale, torch.float32)
    if arguments.shape_of(scale) not in shapes:
        raise ValueError(f"{name}: got shape {arguments.shape_of(scale)}, want {wanted}")
    if scale.is_cpu or (arguments.DEBUG and scale.is_cuda):
        arguments.check_all_positive(name, scale)
    if form.given_scale == "tensor":
        return 0, 0
    return scale.stride(0), scale.stride(1) if form.given_scale == "channel" else 0


# -- the scores --------------------------------------------------------------------------------------------------------


def check_bias(bias: torch.Tensor, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Returns the strides, in elements, with which the bias broadcasts to ``shape`` [batch, q_len, num_q_heads,
    max_seq_len]. A stride is 0 if the bias repeats along its dimension.

    Raises TypeError or ValueError unless the bias is fp32 or bf16 and broadcasts to ``shape``.
    """
    arguments.check_dtype("attn_bias", bias, *BIAS_DTYPES)
    padded = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(padded) != 4 or any(size not in (1, full) for size, full in zip(padded, shape, strict=True)):
        raise ValueError(
            f"attn_bias: got shape {arguments.shape_of(bias)}, want one that broadcasts to [batch, q_len, num_q_heads, "
            f"max_seq_len], here {list(shape)}"
        )
    strides = (0,) * (4 - bias.dim()) + bias.stride()
    batch, query, head, key = (0 if size == 1 else stride for size, stride in zip(padded, strides, strict=True))
    return batch, query, head, key


def check_absent(beside: str, why: str, options: Mapping[str, object]) -> None:
    """Raises ValueError if any of ``options`` is not None. beside: the argument of the call that excludes them, for the
    message. why: the reason, with which the message ends.
    """
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: got a value beside {beside}, want None: {why}")


# -- the result --------------------------------------------------------------------------------------------------------


def out_wanted(out: object, q: torch.Tensor, sizes: tuple[int, ...], why: str) -> Wanted:
    """Returns the required dtype, sizes and device of ``out`` for ``q``. why: how the message about wrong sizes
    ends.
    """
    return Wanted("out", out, (q.dtype,), sizes, q.device, "q", ", that of q", why, contiguous=True)


def check_out(out: torch.Tensor, q: torch.Tensor, v_head_dim: int) -> None:
    """Raises TypeError or ValueError unless ``out`` has the shape and dtype of the result for ``q``; its address and
    strides are not checked."""
    arguments.check_tensors(out=out)
    arguments.check_dtype("out", out, q.dtype, why=", that of q")
    arguments.check_shape("out", out, *q.shape[:-1], v_head_dim, why=": q's, with the head_dim of V")
