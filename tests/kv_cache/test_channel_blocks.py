"""Appending keys in blocks: the reference, the kernel warp by warp, caches with such keys, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from cute_kernels.attention import decode_attention
from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache import (
    KVCache,
    Moments,
    Rope,
    append_and_decode,
    append_kv,
    bulk_ops,
    dequantize_kv,
    quantize_kv,
)
from cute_kernels.kv_cache import channel_blocks as host
from cute_kernels.kv_cache.config import BulkConfig
from cute_kernels.runtime import native
from layouts.kv.channel_blocks import BLOCK_TOKENS, LIMIT, ChannelBlocks
from simulator import Gpu, Int32, Int64, running
from tests.kv_cache.channel_fills import CASES, HEADS, KEYS, PAGE, clone, fill_of

VALUES = format_of("int4_g4")
needs_dsl = pytest.mark.skipif(native.dsl_version() is None, reason="the kernels are written in nvidia-cutlass-dsl")


def simulate(fill: host.Fill, order: Callable[[range], Iterable[int]]) -> None:
    """The kernel, every warp of every CTA in turn, the blocks of a request in an order."""
    from cute_kernels.kv_cache import channel_blocks_kernel as device
    from cute_kernels.kv_cache.config import WrittenRows

    gpu = Gpu()
    at = {name: gpu.put(value) for name, value in fill._asdict().items() if isinstance(value, torch.Tensor)}
    page, token, head = fill.k_cache.stride()[:3]
    token, head = (token, head) if fill.cache_layout == "NHD" else (head, token)
    table = fill.block_table
    cache = device.Cache(
        base=Int64(at["k_cache"]),
        strides=(Int64(page), Int64(token), Int64(head)),
        num_pages=Int32(fill.k_cache.shape[0]),
        page_size=Int32(fill.k_cache.shape[1 if fill.cache_layout == "NHD" else 2]),
        table=Int64(at.get("block_table", 0)),
        table_stride=Int64(0 if table is None else table.stride(0)),
        max_pages=Int32(0 if table is None else table.shape[1]),
    )
    keys = device.Keys(Int64(at["k_new"]), Int64(at["k_tail"]), Int64(at["tail_slots"]), Int32(HEADS))
    requests = device.Requests(Int64(at["seq_lens"]), Int64(at.get("cu_seqlens", 0)))
    most = len(fill.k_new) if fill.cu_seqlens is not None else 1
    with running(gpu):
        kernel: Any = device.FillKernel(WrittenRows(fill.k_format, fill.k_new.shape[2]))
        for request in range(len(fill.seq_lens)):
            for block in order(range((most + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1)):
                for h in range(HEADS):
                    for warp in range(kernel.num_threads // 32):
                        gpu.block, gpu.warp = (block, h, request), warp
                        kernel.kernel(keys, requests, cache)
    gpu.get(at["k_cache"], fill.k_cache)
    gpu.get(at["k_tail"], fill.k_tail)


@needs_dsl
@pytest.mark.parametrize(("counts", "starts"), CASES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "layout", "paged"), [(128, "NHD", True), (64, "HND", True), (64, "NHD", False)], ids=str
)
def test_the_kernel_fills_blocks_as_the_reference(counts, starts, head_dim, layout, paged):
    fill = fill_of(counts, starts, head_dim, layout, paged)
    fill.k_new[0, 0, 3] = LIMIT
    want = clone(fill)
    host.reference(*want)
    for order in (iter, reversed):  # no CTA's result depends on another's
        own = clone(fill)
        simulate(own, order)
        assert torch.equal(own.k_tail, want.k_tail)
        assert torch.equal(own.k_cache, want.k_cache)
    assert not torch.equal(want.k_tail, fill.k_tail)
    full = any((s + c) // BLOCK_TOKENS > s // BLOCK_TOKENS for c, s in zip(counts, starts, strict=True))
    assert torch.equal(want.k_cache, fill.k_cache) != full


# -- a cache -----------------------------------------------------------------------------------------------------------


def make_cache(**changes) -> KVCache:
    options: dict[str, Any] = {"kv_format": ("int4_channel32", "int4_g4"), "max_seqs": 3} | changes
    return KVCache(1, 16, PAGE, HEADS, 128, **options)


def numbers(count: int, heads: int = HEADS, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, heads, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


def append(cache: KVCache, seq_id: str, k: torch.Tensor, v: torch.Tensor) -> None:
    cache.append(0, cache.make_batch(3).update([seq_id], len(k)), k, v)


def as_read(k: torch.Tensor) -> torch.Tensor:
    """What a cache has of keys: full blocks in 4 bits, the others in 16."""
    full = len(k) // BLOCK_TOKENS * BLOCK_TOKENS
    waiting = ChannelBlocks(128).waiting(k)
    return torch.cat((KEYS.dequantize(KEYS.quantize(waiting[:full]), 128, torch.float32), waiting[full:].float()))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_gives_back_blocks_and_what_waits(layout):
    cache, k, v = make_cache(cache_layout=layout), numbers(150), numbers(150, seed=1)
    cache.allocate("a", 70)
    append(cache, "a", k[:70], v[:70])
    for at in range(70, 150, 16):
        cache.extend("a", min(16, 150 - at))
        append(cache, "a", k[at : at + 16], v[at : at + 16])
        found = cache.read(0, "a", torch.float32)
        assert torch.equal(found[0], as_read(k[: cache.seq_len("a")]))
    assert torch.equal(found[1], VALUES.dequantize(VALUES.quantize(v), 128, torch.float32))
    assert cache.memory_report().tail_bytes == 3 * 64 * HEADS * 128 * 2


def test_a_fork_goes_on_from_the_keys_that_wait():
    cache, k, v = make_cache(), numbers(80), numbers(80)
    cache.allocate("a", 50)
    append(cache, "a", k[:50], v[:50])
    cache.fork("a", "b")
    for seq_id, rest in (("a", numbers(30, seed=5)), ("b", k[50:])):
        cache.extend(seq_id, 30)
        append(cache, seq_id, rest, v[50:])
        assert torch.equal(cache.read(0, seq_id, torch.float32)[0], as_read(torch.cat((k[:50], rest))))


@pytest.mark.parametrize(("length", "kept"), [(100, 68), (97, 65), (96, 70), (200, 160), (70, 40), (33, 31)])
def test_tokens_are_taken_back_exactly(length, kept):
    cache, k, other = make_cache(), numbers(length), numbers(90, seed=7)
    cache.allocate("a", length)
    append(cache, "a", k, k)
    cache.truncate("a", kept)
    cache.extend("a", 90)
    append(cache, "a", other, other)
    assert torch.equal(cache.read(0, "a", torch.float32)[0], as_read(torch.cat((k[:kept], other))))


def test_a_block_whose_keys_are_gone_is_not_opened_again():
    cache, k = make_cache(), numbers(200)
    cache.allocate("a", 200)
    append(cache, "a", k, k)
    with pytest.raises(ValueError, match="num_tokens: got 100 for 'a', want a multiple of 32 or at least 160"):
        cache.truncate("a", 100)
    assert cache.seq_len("a") == 200
    cache.truncate("a", 170)
    with pytest.raises(ValueError, match="num_tokens: got 150"):
        cache.truncate("a", 150)
    cache.truncate("a", 96)
    cache.extend("a", 20)
    append(cache, "a", k[:20], k[:20])
    cache.truncate("a", 105)
    assert torch.equal(cache.read(0, "a", torch.float32)[0], as_read(torch.cat((k[:96], k[:9]))))


def test_a_step_of_a_cache_is_append_and_attention():
    rope, q = Rope(128), numbers(2, 8, seed=3).unsqueeze(1)
    caches = make_cache(), make_cache()
    for cache in caches:
        for seq_id, length in (("a", 63), ("b", 31)):
            cache.allocate(seq_id, length)
            cache.append(0, cache.make_batch(1).update([seq_id], length), numbers(length), numbers(length), rope=rope)
        cache.extend_all(["a", "b"])
    k, v = numbers(2, seed=8), numbers(2, seed=9)
    batches = [cache.make_batch(3).update(["a", "b"], pad_to=3) for cache in caches]
    padded = [torch.cat((x, torch.zeros_like(x[:1]))) for x in (q, k, v)]
    out = caches[0].append_and_attend(0, batches[0], padded[0], padded[1][:, None], padded[2][:, None], rope=rope)
    turned = caches[1].append(0, batches[1], padded[1], padded[2], q=padded[0][:, 0], rope=rope)
    assert turned is not None
    assert torch.equal(out, caches[1].attend(0, batches[1], turned[:, None]))
    assert (out[2] == 0).all() and (out[:2] != 0).any()
    assert torch.equal(caches[0].k_pages, caches[1].k_pages)


def test_slots_are_given_and_taken():
    cache = make_cache()
    for seq_id in ("a", "b", "c"):
        cache.allocate(seq_id, 1)
    for name, new in {"seq_id": lambda: cache.allocate("d", 1), "new_id": lambda: cache.fork("a", "d")}.items():
        with pytest.raises(ValueError, match=f"^{name}: got 'd' beside 3 sequences, want at most max_seqs 3 at a time"):
            new()
    cache.free("b")
    cache.allocate("d", 1)
    slots = cache.make_batch(3).update(["c", "d", "a"]).tail_slots
    assert slots is not None and slots.tolist() == [2, 1, 0]
    assert make_cache(kv_format="int4_g4", max_seqs=None).make_batch(1).tail_slots is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_seqs": None},
            "max_seqs: got None, want the number of sequences that there may be at a time for int4_channel32",
        ),
        ({"kv_format": "int4_g4"}, "max_seqs: got 3, want None for int4_g4 keys"),
        ({"kv_format": "int4_channel32"}, "kv_format: got int4_channel32 for V, which is for keys alone"),
        ({"max_seqs": 0}, "max_seqs"),
    ],
)
def test_caches_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make_cache(**changes)


def test_pages_hold_whole_blocks_and_heads_what_can_be_read():
    options: dict[str, Any] = {"kv_format": ("int4_channel32", "int4_g4"), "max_seqs": 1}
    with pytest.raises(ValueError, match="page_size: got 16, want a multiple of 32 for int4_channel32"):
        KVCache(1, 4, 16, HEADS, 128, **options)
    with pytest.raises(ValueError, match="head_dim 256 of int4_channel32 is not 64 or 128"):
        KVCache(1, 4, 64, HEADS, 256, **options)


def test_what_moves_rows_alone_refuses_keys_in_blocks():
    cache = make_cache()
    cache.allocate("a", 40)
    with pytest.raises(ValueError, match="want a cache of another format"):
        cache.export_sequence("a")
    k = numbers(1)[None]
    step: dict[str, Any] = {"kv_format": cache.kv_format, "seq_lens": torch.tensor([1], dtype=torch.int32)}
    with pytest.raises(ValueError, match="kv_format: got int4_channel32 keys, .* want another format, or append_kv"):
        append_and_decode(numbers(1, 8)[None], k, k, cache.k_pages[0][:1], cache.v_pages[0][:1], **step)


def test_quantising_rows_wants_whole_blocks():
    x = numbers(64).float()
    rows = quantize_kv(x, kv_format="int4_channel32")
    assert torch.equal(dequantize_kv(rows, kv_format="int4_channel32", head_dim=128, dtype=torch.float32), as_read(x))
    with pytest.raises(ValueError, match="want whole blocks of 32 tokens"):
        quantize_kv(x[:40], kv_format="int4_channel32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"k_tail": None},
            r"k_tail: got None, want fp16 \[slots, 64, 2, 128\], where .* wait, for int4_channel32",
        ),
        ({"seq_lens": None, "slot_mapping": torch.zeros(2, dtype=torch.int64)}, "want seq_lens for int4_channel32"),
        ({"kv_format": "int4_g4"}, "k_tail: got a tensor, want None for int4_g4 keys"),
        ({"kv_format": ("int4_g4", "int4_channel32")}, "int4_channel32 for v_cache"),
        ({"tail_slots": torch.zeros(3, dtype=torch.int32)}, r"tail_slots: got shape \[3\], want \[2\]"),
    ],
)
def test_appends_that_cannot_be_are_named(changes, message):
    fill = fill_of((1, 1), (4, 31))
    given: dict[str, Any] = {
        "kv_format": ("int4_channel32", "int4_g4"), "seq_lens": fill.seq_lens, "block_table": fill.block_table,
        "k_tail": fill.k_tail, "tail_slots": fill.tail_slots,
    }  # fmt: skip
    k = numbers(2)
    with pytest.raises((TypeError, ValueError), match=message):
        append_kv(k, k, fill.k_cache, torch.zeros_like(fill.k_cache), **(given | changes))


def test_a_step_without_requests_fills_no_block():
    """All of its tokens pad it; a launch would have no CTA."""
    fill = fill_of((1, 1), (4, 31))
    nothing = fill._replace(
        seq_lens=fill.seq_lens[:0], cu_seqlens=torch.zeros(1, dtype=torch.int32), tail_slots=fill.tail_slots[:0],
        block_table=torch.zeros(0, 2, dtype=torch.int32),
    )  # fmt: skip
    host.launch(*nothing)
    names = ("seq_lens", "cu_seqlens", "tail_slots", "block_table", "k_tail")
    given: dict[str, Any] = {name: getattr(nothing, name) for name in names}
    k, k_cache, k_tail = numbers(2), fill.k_cache.clone(), fill.k_tail.clone()
    v_cache = torch.zeros(*k_cache.shape[:3], VALUES.row_elements(128), dtype=torch.uint8)
    append_kv(k, k, k_cache, v_cache, kv_format=("int4_channel32", "int4_g4"), **given)
    assert torch.equal(k_cache, fill.k_cache) and torch.equal(k_tail, fill.k_tail) and not v_cache.any()


def test_appends_and_attention_compile_without_graph_breaks():
    fill = fill_of((1, 1), (4, 31))
    caches = {name: fill.k_cache.clone() for name in ("k_cache", "v_cache")}
    caches["v_cache"] = VALUES.quantize(torch.randn(*caches["v_cache"].shape[:3], 128))
    given: dict[str, Any] = {"kv_format": ("int4_channel32", "int4_g4"), "seq_lens": fill.seq_lens}
    given |= {"block_table": fill.block_table, "tail_slots": fill.tail_slots}
    q, k = numbers(2, 4), numbers(2)

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor, k_tail: torch.Tensor) -> torch.Tensor:
        append_kv(k * 2, k, k_cache, v_cache, k_tail=k_tail, **given)
        return decode_attention(q[:, None], k_cache, v_cache, k_tail=k_tail, **given)

    plain, traced = ([x.clone() for x in (*caches.values(), fill.k_tail)] for _ in range(2))
    want = step(*plain)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(*traced)
    assert torch.equal(found, want)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert not torch.equal(plain[0], caches["k_cache"]) and not torch.equal(plain[2], fill.k_tail)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_transformed_cache_attends_as_over_what_it_reads(return_lse):
    k, v, q = numbers(70), numbers(70, seed=1), numbers(1, 8, seed=2)
    transform = Moments().update(numbers(70, 8, seed=4), k, v).transform(k_rotation=32)
    cache = make_cache(transform=transform)
    cache.allocate("a", 70)
    batch = cache.make_batch(1).update(["a"], 70)
    append(cache, "a", k, v)
    out = cache.attend(0, batch, q[None], q_transformed=False, return_lse=return_lse)
    read_k, read_v = (x.double() for x in cache.read(0, "a", torch.float32))
    scores = torch.einsum("hd,thd->ht", q[0].double(), read_k.repeat_interleave(4, 1)) * 128**-0.5
    want = torch.einsum("ht,thd->hd", scores.softmax(1), read_v.repeat_interleave(4, 1))
    found, lse = out if return_lse else (out, None)
    assert float((found[0, 0].double() - want).abs().max()) <= 0.02
    if lse is not None:
        assert float((lse[0, 0].double() - scores.logsumexp(1)).abs().max()) <= 0.02


def test_the_bulk_kernels_leave_blocks_to_the_format():
    """On a GPU, too: rows of blocks are not made one by one."""
    x = numbers(64)
    rows = bulk_ops._launch_quantize(bulk_ops.Quantize(x, "int4_channel32"))
    assert torch.equal(rows, quantize_kv(x, kv_format="int4_channel32"))
    back = bulk_ops._launch_dequantize(bulk_ops.Dequantize(rows, "int4_channel32", 128, torch.float32))
    assert torch.equal(back, as_read(x.float()))
    for direction in ("quantize", "dequantize"):
        assert BulkConfig(direction, "int4_channel32", "bf16", 128).can_implement() is not None


@pytest.mark.parametrize(
    ("slots", "message"), [((0, -1), "got -1 for request 1"), ((0, 3), "want 0 to 2"), ((1, 1), "requests 0 and 1")]
)
def test_a_slot_that_is_none_or_anothers_is_named(slots, message):
    fill = fill_of((1, 1), (4, 31))._replace(tail_slots=torch.tensor(slots, dtype=torch.int32))
    with pytest.raises(ValueError, match=f"^tail_slots: .*{message}"):
        host.reference(*fill)
    host.reference(*fill._replace(seq_lens=torch.tensor([5, 0], dtype=torch.int32)))  # one that pads a batch
