"""`AppendCall`, one call of append as data, and its checks. Errors name the argument."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import (
    check_apart,
    check_contiguous,
    check_dtype,
    check_number,
    check_place,
    check_shape,
    check_tensors,
    overlaps,
    shape_of,
)
from cute_kernels.attention.checks import Q_DTYPES, check_alike, check_given_scale, check_layout, check_row
from cute_kernels.formats.kv import HEAD_DIMS, KvFormat, format_of
from cute_kernels.formats.kv.transforms import CacheTransform, check_transform
from cute_kernels.kv_cache.config import MAX_TRANSFORMED_HEADS
from cute_kernels.kv_cache.rope import Rope

MAX_TOKENS = 2**31 - 1
WITH_STRIDES = ("k", "v", "q", "q_out", "k_cache", "v_cache", "block_table")
POSITION_DTYPES = (torch.int32, torch.int64)


class AppendCall(NamedTuple):
    """The arguments of `append_kv`, in the operator's order; `append_kv` documents them."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_format: str
    v_format: str
    cache_layout: str = "NHD"
    rope: Rope | None = None
    norm_eps: float = 1e-6
    q: torch.Tensor | None = None
    q_out: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    transform: CacheTransform | None = None
    cu_seqlens: torch.Tensor | None = None
    slot_mapping: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_shift: torch.Tensor | None = None

    @property
    def extras(self) -> tuple[Any, ...]:
        """The arguments that most calls leave out: all fields from cu_seqlens on."""
        return self[NUM_USUAL:]

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        return format_of(self.k_format), format_of(self.v_format)

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def num_q_heads(self) -> int:
        """Number of q heads; 0 without q."""
        return 0 if self.q is None else self.q.shape[1]

    @property
    def batch(self) -> int:
        """Number of requests of the call; 0 if only slots are given."""
        return 0 if self.seq_lens is None else self.seq_lens.shape[0]

    @property
    def has_places(self) -> bool:
        """Whether the caches may have a place for some token. Without requests and slots, all tokens are padding."""
        return self.num_tokens > 0 and (self.seq_lens is None or self.batch > 0)

    @property
    def num_pages(self) -> int:
        """Number of pages of the caches; a contiguous cache has one page per request."""
        return self.v_cache.shape[0]

    @property
    def page_size(self) -> int:
        """Number of tokens of a page; max_seq_len for a contiguous cache."""
        return self.v_cache.shape[1 if self.cache_layout == "NHD" else 2]


NUM_USUAL = AppendCall._fields.index("cu_seqlens")
"""The number of fields that most calls use; the fields after them are extras."""


def split_bias(name: str, bias: object) -> tuple[Any, Any, Any]:
    """Returns the biases of q, k and v from ``qkv_bias``. Raises TypeError unless it is a tuple of three."""
    if not isinstance(bias, (tuple, list)) or len(bias) != 3:
        found = f"{len(bias)} of them" if isinstance(bias, (tuple, list)) else type(bias).__name__
        raise TypeError(f"{name}: got {found}, want a tuple of q's, k's and v's, each a tensor or None")
    return bias[0], bias[1], bias[2]


def check_append(call: AppendCall) -> None:
    """Raises TypeError or ValueError unless the arguments describe an append.

    Only shapes, dtypes, strides and devices are checked, so nothing waits for a GPU.
    """
    k_format, v_format = call.formats
    check_kinds(call)
    _check_tokens(call)
    check_layout(call.cache_layout)
    check_cache("k_cache", call, call.k_cache, k_format, call.k.shape[2])
    check_cache("v_cache", call, call.v_cache, v_format, call.v.shape[2])
    for name, form in (("k", k_format), ("v", v_format)):
        if form.in_blocks or (form.by_token and name == "v"):
            raise ValueError(
                f"kv_format: got {form.name} for {name}_cache, whose rows are not written token by token; want a "
                "format of rows"
            )
    if k_format.by_token:
        if call.k_cache.shape[0] != call.num_tokens:
            found = f"k_cache: got shape {shape_of(call.k_cache)}"
            raise ValueError(f"{found}, want a row for each of {call.num_tokens} tokens")
    else:
        check_alike(call.k_cache, call.v_cache)
    _check_place(call)
    _check_extras(call)
    _check_transform(call)
    check_given_scale("k_scale", call.k_scale, k_format, call.num_kv_heads, call.k.shape[2])
    check_given_scale("v_scale", call.v_scale, v_format, call.num_kv_heads, call.v.shape[2])
    _check_memory(call)


def _check_memory(call: AppendCall) -> None:
    """Raises ValueError if a tensor that the append writes overlaps with another argument. q_out may be q itself."""
    others = {name: value for name, value in call._asdict().items() if isinstance(value, torch.Tensor)}
    for name in ("v_cache", "k_cache", "q_shift", "q_out"):
        written = others.pop(name, None)
        if written is not None:
            check_apart(name, written, others, in_place=("q",) if name == "q_out" else ())


def check_kinds(call: AppendCall) -> None:
    """Raises TypeError or ValueError unless every tensor argument is a tensor on k's device, and is contiguous if it
    has to be.
    """
    names = (
        "k v k_cache v_cache seq_lens cu_seqlens slot_mapping block_table q q_out q_bias k_bias v_bias position_ids "
        "q_norm k_norm k_scale v_scale q_shift"
    ).split()
    for name in names:
        tensor: torch.Tensor | None = getattr(call, name)
        if tensor is None and name not in names[:4]:
            continue
        check_tensors(**{name: tensor})
        assert tensor is not None
        check_place(name, tensor, call.k.device, "k")
        if name == "block_table" and tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{name}: got strides {tensor.stride()}, want columns side by side")
        if name not in WITH_STRIDES:
            check_contiguous(name, tensor)


def _check_tokens(call: AppendCall) -> None:
    if call.q_out is not None and call.q is None:
        raise ValueError("q_out: got a tensor without q, want both or none")
    for name in ("k", "v", "q", "q_out"):
        x = getattr(call, name)
        if x is None:
            continue
        check_shape(name, x, "tokens", "heads", "head_dim")
        check_dtype(name, x, *Q_DTYPES)
        check_dtype(name, x, call.k.dtype, why=", that of k")
        if x.shape[0] != call.k.shape[0]:
            raise ValueError(f"{name}: got {x.shape[0]} tokens, want {call.k.shape[0]}, those of k")
        if x.shape[2] not in HEAD_DIMS:
            raise ValueError(f"{name}: got head_dim {x.shape[2]}, want one of {', '.join(map(str, HEAD_DIMS))}")
        if x.shape[1] == 0:
            raise ValueError(f"{name}: got no heads, want at least 1")
        found = f"{name}: got strides {x.stride()} for shape {shape_of(x)}"
        if x.numel() and (x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2])):
            raise ValueError(f"{found}, want the last two dimensions contiguous")
        if name == "q_out" and overlaps(x):
            raise ValueError(f"{found}, want rows that do not overlap")
    if call.v.shape[1] != call.k.shape[1]:
        raise ValueError(f"v: got {call.v.shape[1]} heads, want {call.k.shape[1]}, those of k")
    if call.num_tokens > MAX_TOKENS:
        raise ValueError(f"k: got {call.num_tokens} tokens, want at most {MAX_TOKENS}")
    if call.q is not None and call.q.shape[2] != call.k.shape[2]:
        raise ValueError(f"q: got head_dim {call.q.shape[2]}, want {call.k.shape[2]}, that of k")
    if call.q_out is not None and call.q is not None:
        check_shape("q_out", call.q_out, *call.q.shape, why=", that of q")


def check_cache(name: str, call: AppendCall, cache: torch.Tensor, form: KvFormat, head_dim: int) -> None:
    inner = "page_size, num_kv_heads" if call.cache_layout == "NHD" else "num_kv_heads, page_size"
    check_shape(name, cache, "num_pages or batch", *inner.split(", "), "row")
    check_dtype(name, cache, *form.cache_dtypes, why=f" for {form.name}")
    check_row(name, cache, form, head_dim)
    heads = cache.shape[2 if call.cache_layout == "NHD" else 1]
    if heads != call.num_kv_heads:
        raise ValueError(
            f"{name}: got {heads} heads in shape {shape_of(cache)} ({call.cache_layout}: [num_pages or batch, {inner}, "
            f"row]), want {call.num_kv_heads}, those of k"
        )
    if cache.numel() and cache.stride(3) != 1:
        raise ValueError(f"{name}: got strides {cache.stride()}, want rows contiguous: a last stride of 1")
    if overlaps(cache):
        found = f"got strides {cache.stride()} for shape {shape_of(cache)}"
        raise ValueError(f"{name}: {found}, want rows that do not overlap")


def _check_place(call: AppendCall) -> None:
    tokens = call.num_tokens
    for name, dtypes in (
        ("seq_lens", (torch.int32,)),
        ("cu_seqlens", (torch.int32,)),
        ("slot_mapping", (torch.int64,)),
        ("block_table", (torch.int32,)),
        ("position_ids", POSITION_DTYPES),
    ):
        if (tensor := getattr(call, name)) is not None:
            check_dtype(name, tensor, *dtypes)
    for name in ("slot_mapping", "position_ids"):
        if (tensor := getattr(call, name)) is not None:
            check_shape(name, tensor, tokens, why=", the tokens of k")
    if call.cu_seqlens is not None and call.seq_lens is None:
        raise ValueError("cu_seqlens: got it without seq_lens, want both: lengths say at which positions tokens go")
    if call.seq_lens is not None:
        check_shape("seq_lens", call.seq_lens, "batch")
        if call.cu_seqlens is None and call.batch != tokens:
            raise ValueError(
                f"seq_lens: got {call.batch} requests for {tokens} tokens, want one token a request, or cu_seqlens"
            )
        if call.cu_seqlens is not None:
            check_shape("cu_seqlens", call.cu_seqlens, call.batch + 1, why=", batch + 1")
    if call.slot_mapping is not None:
        if call.block_table is not None:
            raise ValueError("block_table: got one together with slot_mapping, which says where tokens go; want one")
        if call.rope is not None and call.position_ids is None and call.seq_lens is None:
            raise ValueError("position_ids: got None with rope and slot_mapping, want positions (or seq_lens)")
    elif call.seq_lens is None:
        raise ValueError("seq_lens: got None without slot_mapping, want lengths after the append, or that")
    elif call.block_table is not None:
        if call.block_table.dim() != 2 or call.block_table.shape[0] != call.batch or call.block_table.shape[1] == 0:
            raise ValueError(
                f"block_table: got shape {shape_of(call.block_table)}, want [{call.batch}, at least 1], a row a request"
            )
    elif call.num_pages != call.batch:
        raise ValueError(
            f"k_cache: got {call.num_pages} requests in shape {shape_of(call.k_cache)}, want {call.batch}, those of "
            "seq_lens (or a block_table, or slot_mapping)"
        )


def _check_extras(call: AppendCall) -> None:
    k_dim, v_dim = call.k.shape[2], call.v.shape[2]
    if call.q is None:
        for name in ("q_bias", "q_norm"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name}: got a tensor without q, want None")
    sizes = {
        "q_bias": call.num_q_heads * k_dim,
        "k_bias": call.num_kv_heads * k_dim,
        "v_bias": call.num_kv_heads * v_dim,
        "q_norm": k_dim,
        "k_norm": k_dim,
    }
    for name, size in sizes.items():
        if (tensor := getattr(call, name)) is not None:
            check_dtype(name, tensor, call.k.dtype, why=", that of k")
            check_shape(name, tensor, size)
    check_number("norm_eps", call.norm_eps, least=0)
    if call.rope is None:
        return
    if not isinstance(call.rope, Rope):
        raise TypeError(f"rope: got {type(call.rope).__name__}, want a Rope")
    if call.rope.rotary_dim > k_dim:
        raise ValueError(f"rope: got rotary_dim {call.rope.rotary_dim}, want at most {k_dim}, k's head_dim")


def _check_transform(call: AppendCall) -> None:
    """Raises TypeError or ValueError unless the transform fits the heads, and q_shift fits the queries."""
    transform, shift = call.transform, call.q_shift
    check_transform("transform", transform)
    if transform is not None:
        transform.validate(call.num_kv_heads, call.k.shape[2], call.v.shape[2])
        if transform.device not in (None, call.k.device):
            raise ValueError(f"transform: got one on {transform.device}, want it on {call.k.device}, where k is")
        if call.num_q_heads % call.num_kv_heads or call.num_q_heads > MAX_TRANSFORMED_HEADS:
            raise ValueError(
                f"q: got {call.num_q_heads} heads with a transform, want a multiple of the {call.num_kv_heads} KV "
                f"heads, at most {MAX_TRANSFORMED_HEADS}"
            )
    if shift is None:
        return
    if call.q is None or transform is None or transform.k_center is None:
        raise ValueError("q_shift: got a tensor without q and a transform that has a k_center, want None")
    check_dtype("q_shift", shift, torch.float32)
    check_shape("q_shift", shift, *call.q.shape[:2], why=", tokens and heads of q")
