"""The operands of the append kernel, as objects of run-time values."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.kv_cache.arguments import CONSTANTS, TERMS
from cute_kernels.kv_cache.config import GROUP_BITS, HAS_Q


@dataclass(frozen=True)
class Inputs:
    """Addresses of q, k and v, the strides in bytes of their tokens, and sizes. num_q_heads is 0 without q."""

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
    """Addresses of the tensors that are written, q_out and the caches; strides in bytes of q_out's tokens, and of each
    cache's (pages, tokens, heads).
    """

    q_out: Int64
    k_cache: Int64
    v_cache: Int64
    q_out_stride: Int64
    k_strides: tuple[Int64, Int64, Int64]
    v_strides: tuple[Int64, Int64, Int64]


@dataclass(frozen=True)
class Where:
    """The arguments that decide where tokens are written; see :mod:`cute_kernels.kv_cache.arguments`."""

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
class Constants:
    """Addresses of a transform's constants, fp32 [num_kv_heads, head_dim]; 0 for constants that the transform does not
    have.
    """

    k_center: Int64
    k_factor: Int64
    q_factor: Int64
    v_factor: Int64


@dataclass(frozen=True)
class Terms:
    """Addresses of biases and norm weights, 0 for those that are not given; and the norms' epsilon."""

    q_bias: Int64
    k_bias: Int64
    v_bias: Int64
    q_norm: Int64
    k_norm: Int64
    norm_eps: Float32


@dataclass(frozen=True)
class Transforms:
    """Addresses of a transform's constants and of q_shift; 0 for a missing tensor.

    Constants are fp32 [num_kv_heads, head_dim], q_shift is fp32 [tokens, num_q_heads]. Multiplication by
    ``group_reciprocal`` turns the index of a q head into the index of its KV head, see `GROUP_BITS`.
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
    """Addresses of biases, norm weights and scales, 0 for those that are not given; and the norms' epsilon.
    ``transforms`` is None in variants without a transform.
    """

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
    """How the heads of a token are distributed among CTAs.

    Attributes:
        q_rows: number of q heads that a team takes. The heads of a team are a chunk.
        kv_rows: number of KV heads that a team takes.
        kv_chunks: number of chunks of K's heads; V's heads have as many. Chunks are in the order K, V, q.
        by_kind: whether CTAs are ordered by chunk first (the grid has tokens along x and chunks along y). If not, they
            are ordered by token first.
        few: whether the launch has so few CTAs that attention, if it follows, may start at once.
    """

    q_rows: Int32
    kv_rows: Int32
    kv_chunks: Int32
    by_kind: Boolean
    few: Boolean


@dataclass(frozen=True)
class Heads:
    """The heads that a team takes, all of q, all of k or all of v."""

    first: Int32
    count: Int32


@dataclass(frozen=True)
class Place:
    """A team's token and lane, and the page and row where its K and V are written.

    Nothing is written unless ``valid`` holds and the cache has the page. ``page`` may still be loading.
    """

    token: Int32
    valid: Boolean
    page: Int32
    num_pages: Int32
    row: Int32
    lane: Int32


# -- of a launch's arguments, see `.arguments` -------------------------------------------------------------------------


def inputs_of(given) -> Inputs:
    q_shape, k_shape = _any(given.q.shape), _any(given.k.shape)
    return Inputs(
        q=ptx.address(given.q),
        k=ptx.address(given.k),
        v=ptx.address(given.v),
        q_stride=_byte_strides(given.q)[0],
        k_stride=_byte_strides(given.k)[0],
        v_stride=_byte_strides(given.v)[0],
        num_tokens=k_shape[0],
        num_q_heads=cutlass.select_(given.mode & HAS_Q != 0, Int32(q_shape[1]), Int32(0)),
        num_kv_heads=k_shape[1],
    )


def targets_of(given) -> Targets:
    return Targets(
        q_out=ptx.address(given.q_out),
        k_cache=ptx.address(given.k_cache),
        v_cache=ptx.address(given.v_cache),
        q_out_stride=_byte_strides(given.q_out)[0],
        k_strides=_byte_strides(given.k_cache),
        v_strides=_byte_strides(given.v_cache),
    )


def where_of(given, k_by_token: bool = False) -> Where:
    """Makes the `Where` of a launch from its arguments. k_by_token: whether K's rows are written to a tensor in the
    order of tokens, not to pages. The pages' number and size are then those of V's cache.
    """
    cache_shape = _any((given.v_cache if k_by_token else given.k_cache).shape)
    return Where(
        seq_lens=ptx.address(given.seq_lens),
        block_table=ptx.address(given.block_table),
        cu_seqlens=given.cu_seqlens,
        slots=given.slots,
        position_ids=given.position_ids,
        num_pages=cache_shape[0],
        page_size=cache_shape[1],
        # ceil(2**63 / page_size)
        page_divisor=Int64(2**63 - 1) // Int64(cutlass.max(cache_shape[1], 1)) + 1,
        batch=_any(given.seq_lens.shape)[0],
        max_pages=_any(given.block_table.shape)[1],
        table_stride=Int64(_any(given.block_table.stride)[0]),
        mode=given.mode,
    )


def extras_of(given, transformed: bool) -> Extras:
    names = ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "k_scale", "v_scale", "norm_eps")
    own = {name: getattr(given, name) for name in names}
    return Extras(**own, transforms=_transforms_of(given) if transformed else None)


def constants_of(given) -> Constants:
    return Constants(*(getattr(given, name) for name in CONSTANTS))


def terms_of(given) -> Terms:
    return Terms(*(getattr(given, name) for name in (*TERMS, "norm_eps")))


def _transforms_of(given) -> Transforms:
    num_q_heads, num_kv_heads = _any(given.q.shape)[1], _any(given.k.shape)[1]
    # Without q there are fewer heads than KV heads here, and nobody asks.
    reciprocal = cute.ceil_div(1 << GROUP_BITS, cutlass.max(num_q_heads // num_kv_heads, 1))
    constants = {name: getattr(given, name) for name in CONSTANTS}
    return Transforms(
        **constants, q_shift=given.q_shift, num_q_heads=Int32(num_q_heads), group_reciprocal=Int32(reciprocal)
    )


def _any(value) -> Any:
    """Returns its argument, the shape or strides of a DSL tensor. Type checkers then take it for a plain tuple."""
    return value


def _byte_strides(tensor) -> Any:
    """Returns a tensor's strides in bytes, for all dimensions but the last."""
    return tuple(Int64(stride) * (tensor.element_type.width // 8) for stride in tensor.stride[:-1])
