"""What the append kernel works on, as objects of run-time values."""

from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, Int64

from cute_kernels.kv_cache.page import PageSlot


@dataclass(frozen=True)
class Inputs:
    """Addresses of q, k and v, bytes from token to token, and sizes; without q it has no heads."""

    q: Int64
    k: Int64
    v: Int64
    q_stride: Int64
    k_stride: Int64
    v_stride: Int64
    num_tokens: Int32
    num_q_heads: Int32
    num_kv_heads: Int32


@dataclass(frozen=True)
class Targets:
    """Addresses of what is written; strides are bytes per token, and per (page, token, head) of the caches."""

    q_out: Int64
    k_cache: Int64
    v_cache: Int64
    q_out_stride: Int64
    k_strides: tuple[Int64, Int64, Int64]
    v_strides: tuple[Int64, Int64, Int64]


@dataclass(frozen=True)
class Where:
    """What decides where tokens go; see :meth:`cute_kernels.kv_cache.kernel.AppendKernel.__call__`."""

    seq_lens: Int64
    block_table: Int64
    cu_seqlens: Int64
    slots: Int64
    position_ids: Int64
    num_pages: Int32
    page_size: Int32
    page_divisor: Int64
    batch: Int32
    max_pages: Int32
    table_stride: Int64
    mode: Int32


@dataclass(frozen=True)
class Transforms:
    """Addresses of a transform's constants, 0 where there is none, and of what it takes off the scores of q's rows.

    Constants are fp32 [num_kv_heads, head_dim]; q_shift fp32 [tokens, num_q_heads]. ``group_reciprocal`` finds a q
    head's KV head, see `GROUP_BITS`.
    """

    k_center: Int64
    k_factor: Int64
    q_factor: Int64
    v_factor: Int64
    q_shift: Int64
    num_q_heads: Int32
    group_reciprocal: Int32


@dataclass(frozen=True)
class Extras:
    """Addresses of what rows are combined with, 0 where there is none; ``transforms`` of variants that have them."""

    q_bias: Int64
    k_bias: Int64
    v_bias: Int64
    q_norm: Int64
    k_norm: Int64
    k_scale: Int64
    v_scale: Int64
    norm_eps: Float32
    transforms: Transforms | None = None


@dataclass(frozen=True)
class Shares:
    """q heads, and KV heads, of a team; chunks of K's heads, before V's and then q's; by_kind, few: see the launch."""

    q_rows: Int32
    kv_rows: Int32
    kv_chunks: Int32
    by_kind: Boolean
    few: Boolean


@dataclass(frozen=True)
class Heads:
    """A team's heads of one of q, k and v."""

    first: Int32
    count: Int32


@dataclass(frozen=True)
class Place:
    """A team's token and lane, and the page and row where its K and V go.

    Nothing is to be written there unless ``valid`` and the page is one of the cache's. ``page`` may be on its way
    still; for decode it says where in ``page_slot`` it comes to, see :mod:`cute_kernels.kv_cache.page`.
    """

    token: Int32
    valid: Boolean
    page: Int32
    num_pages: Int32
    row: Int32
    lane: Int32
    page_slot: PageSlot | None = None
