"""What a call writes shares no memory with what it reads, nor do caches with each other: refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels.arguments import share_memory
from cute_kernels.attention import ops
from cute_kernels.attention.call import Given
from cute_kernels.attention.options import NO_EXTEND_OPTIONS
from cute_kernels.kv_cache import ops as append_ops
from tests.attention.cases import make_call
from tests.extend.cases import make_call as make_extend
from tests.linear.cases import known
from tests.misuse import calls as misuse
from tests.mla.cases import make_dense, make_sparse
from tests.mla_cache.cases import make_call as make_mla_append


def bytes_of(tensor: torch.Tensor) -> set[int]:
    places = {tensor.data_ptr()}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + i * stride * tensor.element_size() for place in places for i in range(size)}
    return {place + i for place in places for i in range(tensor.element_size())}


def view(memory: torch.Tensor) -> st.SearchStrategy[torch.Tensor]:
    def made(dims: list[tuple[int, int]], start: int, dtype: torch.dtype) -> torch.Tensor:
        return memory.view(dtype).as_strided([size for size, _ in dims], [stride for _, stride in dims], start)

    dims = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 3, 6, 8, 24])), max_size=3)
    return st.builds(made, dims, st.integers(0, 50), st.sampled_from([torch.uint8, torch.int16, torch.int32]))


MEMORY = torch.zeros(2048, dtype=torch.uint8)


@settings(max_examples=400, deadline=None)
@given(view(MEMORY), view(MEMORY))
def test_no_two_tensors_that_share_memory_are_taken_for_apart(a, b):
    assert share_memory(a, b) == share_memory(b, a)
    assert share_memory(a, b) or not bytes_of(a) & bytes_of(b)


class Wrapped(torch.Tensor):
    """Stands for another tensor, and has no memory."""

    def __new__(cls, x: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(arg.x if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def test_tensors_without_memory_share_none():
    a, b = Wrapped(torch.zeros(4, 8)), Wrapped(torch.zeros(4, 8))
    assert not share_memory(a, b)


def test_parts_of_one_tensor_that_take_turns_are_apart():
    pages = torch.zeros(5, 2, 16, 4, 64)  # K and V of each page
    assert not share_memory(pages[:, 0], pages[:, 1]) and share_memory(pages[:, 0], pages)
    assert not share_memory(pages[..., :16], pages[..., 16:].transpose(2, 3))  # rows of two widths, in two orders
    assert share_memory(pages[..., :17], pages[..., 16:])
    qkv = torch.zeros(7, 3 * 256)
    q, k, v = (part.view(7, -1, 64) for part in qkv.split(256, dim=1))
    assert not share_memory(q, k) and not share_memory(v, q) and share_memory(q, qkv[3])
    assert not share_memory(qkv[:3], qkv[3:]) and share_memory(qkv[:4], qkv[3:])
    assert not share_memory(qkv[:0], qkv)


def decode(**changes: Any) -> Any:
    call = make_call("bf16", [9], num_kv_heads=2, group=2, head_dim=64, max_seq_len=16)
    names = dict(zip(("q", "k_cache", "v_cache", "seq_lens"), call.tensors, strict=True))
    given = names | {name: change(names) for name, change in changes.items()}
    return ck.decode_attention(**given, kv_format="bf16", **call.options)


def extend(out: Callable[[Any], torch.Tensor], **options: Any) -> Any:
    call = make_extend("bf16", [1, 1, 3], [9, 9, 9], head_dim=64, new=True, page_size=16)
    return call.run(out=out(call), **options)


def mixed() -> Any:
    """One query's place off: neither part of the batch writes over its own queries alone."""
    call = make_extend("bf16", [1, 1, 3], [9, 9, 9], head_dim=64, page_size=16)
    memory = torch.zeros(len(call.q) + 1, *call.q.shape[1:]).bfloat16()
    return ck.mixed_attention(memory[1:], *call.tensors[1:], num_decodes=2, **call.keywords, out=memory[:-1])


def append(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None, **options: Any) -> Any:
    new = torch.zeros(2, 2, 64).bfloat16()
    lengths = torch.ones(2, dtype=torch.int32)
    return ck.append_kv(
        new if k is None else k, new.clone(), k_cache, v_cache, kv_format="bf16", seq_lens=lengths, **options
    )


def step(name: str) -> Any:
    q, k, v = (torch.zeros(2, 1, heads, 64).bfloat16() for heads in (4, 2, 2))
    tensors: dict[str, Any] = {"q": q, "k_cache": pages(), "v_cache": pages(), "k": k, "v": v}
    out = tensors[name].view(-1)[: q.numel()].view(q.shape)
    lengths = torch.ones(2, dtype=torch.int32)
    return ck.append_and_decode(**tensors, seq_lens=lengths, kv_format="bf16", out=out)


def pages() -> torch.Tensor:
    return torch.zeros(2, 16, 2, 64).bfloat16()


def dense(**options: Any) -> Any:
    call = make_dense("mla_bf16", [40], num_heads=4)
    out = call.cache.view(-1)[: 4 * 512].view(1, 1, 4, 512)
    return ck.mla_decode(call.q, call.cache, call.seq_lens, block_table=call.block_table, kv_format="mla_bf16", out=out)


def sparse() -> Any:
    call = make_sparse("mla_bf16", num_heads=4, topk=20, num_pages=4, page_size=16)
    out = call.cache.view(-1)[: call.q[..., :512].numel()].view(*call.q.shape[:3], 512)
    return ck.sparse_mla_decode(*call.tensors, kv_format="mla_bf16", **call.options, out=out)


def append_mla() -> Any:
    cache = torch.zeros(2, 16, 576).bfloat16()
    call = make_mla_append("mla_bf16", 576, torch.zeros(4, 576).bfloat16())
    return ck.append_mla(cache[0, :4, :512], call.k_rope, cache, slot_mapping=call.slot_mapping, kv_format="mla_bf16")


def linear() -> Any:
    memory = torch.zeros(3 * 64 + 8).bfloat16()
    x, out = memory[: 3 * 64].view(3, 64), memory[8:].view(3, 64)
    return ck.quantized_linear(x, known(64, 64).pack(), out=out)


def experts(bias: str) -> Any:
    gate_up, down = (ck.quantize_experts(torch.zeros(2, n, 64), group_size=64) for n in (128, 64))
    biases: dict[str, Any] = {
        "gate_up_bias": torch.zeros(2, 128).bfloat16(),
        "down_bias": torch.zeros(2, 64).bfloat16(),
    }
    ids = torch.zeros(2, 1, dtype=torch.int32)
    out = biases[bias].view(-1)[:128].view(2, 64)
    return ck.fused_moe(torch.zeros(2, 64).bfloat16(), gate_up, down, torch.ones(2, 1), ids, **biases, out=out)


def bulk(function: Callable[..., Any], **options: Any) -> Any:
    x = torch.zeros(4, 2, 64).bfloat16()
    return function(x, kv_format="bf16", out=x, **options)


def within(cache: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return cache.view(-1)[: like.numel()].view(like.shape)


KV = torch.zeros(2, 2, 16, 2, 64).bfloat16()
Q = torch.zeros(2, 4, 64).bfloat16()
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "decode, q": (lambda: decode(out=lambda a: a["q"]), "out: got memory that q takes too, want another tensor's"),
    "decode, K": (lambda: decode(out=lambda a: within(a["k_cache"], a["q"])), "out: got memory that k_cache takes"),
    "decode, V": (lambda: decode(out=lambda a: within(a["v_cache"], a["q"])), "out: got memory that v_cache takes"),
    "decode, stride 0": (lambda: decode(k_cache=lambda a: pages()[:1, :1].expand(1, 16, 2, 64)), "do not overlap"),
    "extend, q": (lambda: extend(lambda call: call.q), "out: got memory that q takes too"),
    "extend, new": (lambda: extend(lambda call: same_memory(call)), "new_k: got memory|out: got memory that new_k"),
    "extend, K": (lambda: extend(lambda call: within(call.k_cache, call.q)), "out: got memory that k_cache takes too"),
    "mixed, another row": (mixed, "out: got memory that q takes too"),
    "step, q": (lambda: step("q"), "out: got memory that q takes too"),
    "step, K": (lambda: step("k_cache"), "out: got memory that k_cache takes too"),
    "append, one tensor": (lambda: append(KV[0], KV[0]), "v_cache: got memory that k_cache takes too"),
    "append, a page on": (lambda: append(KV.flatten(0, 1)[:2], KV.flatten(0, 1)[1:3]), "v_cache: got memory that k_c"),
    "append, stride 0": (lambda: append(KV[0, :1].expand(2, 16, 2, 64), KV[1]), "k_cache: .* rows that do not overlap"),
    "append, new in cache": (lambda: append(KV[0], KV[1], KV[0, :, 0]), "k_cache: got memory that k takes too"),
    "append, q moved": (
        lambda: append(KV[0], KV[1], q=Q[:, :2], q_out=Q[:, 1:3]),
        "q_out: got memory that q",
    ),
    "append, q on k": (
        lambda: append(KV[0], KV[1], Q[:, :2], q=Q[:, 2:], q_out=Q[:, :2]),
        "q_out: got memory that k",
    ),
    "append, q over itself": (
        lambda: append(KV[0], KV[1], q=Q[:, 2:], q_out=Q[:1, :2].expand(2, 2, 64)),
        "q_out: got strides .* want rows that do not overlap",
    ),
    "mla": (dense, "out: got memory that cache takes too"),
    "sparse mla": (sparse, "out: got memory that cache takes too"),
    "append mla": (append_mla, "cache: got memory that latent takes too"),
    "quantize": (lambda: bulk(ck.quantize_kv), "out: got memory that x takes too"),
    "dequantize": (lambda: bulk(ck.dequantize_kv, head_dim=64), "out: got memory that rows takes too"),
    "linear, a part": (linear, "out: got memory that x takes too"),
    "experts, first bias": (lambda: experts("gate_up_bias"), "out: got memory that gate_up_bias takes too"),
    "experts, second bias": (lambda: experts("down_bias"), "out: got memory that down_bias takes too"),
}


def same_memory(call: Any) -> torch.Tensor:
    """An out that new_k lies in."""
    out = torch.zeros_like(call.q)
    call.options["new_k"] = out[:, : call.options["new_k"].shape[1]]
    return out


@pytest.mark.parametrize("name", CALLS)
def test_memory_that_two_arguments_take_is_refused_by_name(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


WRITTEN = ("out", "residual_out", "q_out", "q_shift")
READ_BEFORE = {("layer_of_experts", "x")}  # by launches that end before the one that writes


def moved(tensor: torch.Tensor, memory: torch.Tensor, start: int) -> torch.Tensor:
    """The same numbers in other memory."""
    place = memory[start : start + tensor.numel() * tensor.element_size()]
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("name", misuse.CALLS)
def test_no_call_writes_where_another_argument_lies(name):
    function, right = misuse.CALLS[name]()
    tensors = [key for key, value in right.items() if isinstance(value, torch.Tensor) and value.numel()]
    for written, read in itertools.product([key for key in WRITTEN if key in tensors], tensors):
        if written == read or (name, read) in READ_BEFORE:
            continue
        wrong = misuse.CALLS[name]()[1]
        size = wrong[read].numel() * wrong[read].element_size()
        memory = torch.zeros(size + wrong[written].numel() * 4 + 64, dtype=torch.uint8)
        wrong[written] = moved(wrong[written], memory, 16 if size > 16 else 0)  # a part of both, not the same place
        wrong[read] = moved(wrong[read], memory, 0)
        with pytest.raises(ValueError, match=": got memory that .* takes too, want"):
            function(**wrong)


def test_what_lies_side_by_side_is_served():
    fused = torch.zeros(2, 8, 64).bfloat16()
    memory = KV.transpose(0, 1).contiguous()
    given = {"q": fused[:, :4], "q_out": fused[:, :4]}
    assert append(memory[:, 0], memory[:, 1], fused[:, 4:6], **given) is given["q_out"]


def test_out_in_place_of_q_is_no_call_like_an_earlier_one():
    """Repeated calls on a GPU are not checked again: there no plan may be found for it."""
    call = make_call("bf16", [9], num_kv_heads=2, group=2, head_dim=64)
    numbers = ("bf16", None, None, False)
    apart, same = torch.empty_like(call.q), call.q
    keys = [ops._key(Given(*call.tensors, *numbers, out)) for out in (None, apart, same)]
    assert len(set(keys)) == 3
    other = make_extend("bf16", [3], [9])
    keys = [
        ops._key(Given(*other.tensors, *numbers, out, NO_EXTEND_OPTIONS, other.cu_seqlens_q))
        for out in (None, torch.empty_like(other.q), other.q)
    ]
    assert len(set(keys)) == 3
    new, k_cache = torch.zeros(2, 2, 64).bfloat16(), pages()
    caches = ((k_cache, k_cache), (k_cache, pages()))
    first, second = (append_ops._key(((new, new, *pair, "bf16", "bf16", "NHD", *[None] * 7), None)) for pair in caches)
    assert first != second
