"""`KVCache`: what a model's layers see of it, and what it refuses."""

from typing import Any

import pytest
import torch

from cute_kernels import kv_cache
from cute_kernels.formats.kv import FORMATS, format_of
from cute_kernels.kv_cache import KVCache, OutOfPagesError, compute_kv_scale
from tests.kv_cache import oracle

HEADS, DIM = 2, 64


def make_cache(kv_format: Any = "bf16", num_pages=8, page_size=16, num_layers=2, **options):
    return KVCache(num_layers, num_pages, page_size, HEADS, DIM, kv_format=kv_format, **options)


def tokens(count, seed=0, dim=DIM, heads=HEADS):
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


def write(cache, seq_id, count, seed=0):
    """Extends a sequence and writes its new tokens into every layer, others in each; returns K and V by layer."""
    cache.extend(seq_id, count)
    batch = cache.make_batch(1).update([seq_id], count)
    written = []
    for layer in range(cache.num_layers):
        k, v = (tokens(count, 10 * seed + 2 * layer + i, dim) for i, dim in enumerate(cache.head_dims))
        cache.append(layer, batch, k, v)
        written.append((k, v))
    return written


def stored(name, x, scale=None):
    """What a format makes of elements."""
    form = format_of(name)
    return form.dequantize(form.quantize(x.float(), scale), x.shape[-1], torch.float32, scale)


# -- a model's step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", [*FORMATS, ("int8_token_head", "int4_g4"), ("bf16", "e4m3_head")], ids=str)
def test_every_format_stores_and_attends(kv_format, cache_layout):
    names = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    dtype = torch.float16 if "fp16" in names else torch.bfloat16
    cache = make_cache(kv_format, cache_layout=cache_layout, dtype=dtype, num_layers=1)
    x = (tokens(21, 1).to(dtype), tokens(21, 2).to(dtype))
    scales = [
        None if format_of(name).given_scale is None else compute_kv_scale(part, kv_format=name)
        for name, part in zip(names, x, strict=True)
    ]
    if scales != [None, None]:
        cache.set_scales(0, k_scale=scales[0], v_scale=scales[1])
    cache.allocate("a", 21)
    batch = cache.make_batch(2).update(["a"], 21)
    cache.append(0, batch, *x)
    want = [stored(name, part, scale) for name, part, scale in zip(names, x, scales, strict=True)]
    for found, wanted in zip(cache.read(0, "a", torch.float32), want, strict=True):
        assert torch.equal(found, wanted)
    q = tokens(1, 3, heads=4).to(dtype)[:, None]
    out = cache.attend(0, batch, q)
    torch.testing.assert_close(out[0, 0].float(), oracle.attend(q[0, 0], *want)[0], atol=2e-2, rtol=1e-2)


def test_sequences_of_one_batch_keep_their_own_tokens():
    cache = make_cache(num_layers=2)
    lengths = {"a": 20, "b": 3, "c": 16}
    for seq_id, length in lengths.items():
        cache.allocate(seq_id, length)
    batch = cache.make_batch(4).update(list(lengths), list(lengths.values()))
    k, v = tokens(39, 1), tokens(39, 2)
    for layer in range(2):
        cache.append(layer, batch, k * (layer + 1), v)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 20, 23, 39]
    for layer in range(2):
        for seq_id, piece in zip(lengths, (k * (layer + 1)).split(list(lengths.values())), strict=True):
            assert torch.equal(cache.read(layer, seq_id)[0], piece)


def test_k_and_v_may_have_different_head_dims():
    cache = make_cache(("int8_token_head", "bf16"), v_head_dim=128)
    cache.allocate("a", 0)
    written = write(cache, "a", 18)
    k, v = cache.read(1, "a", torch.float32)
    assert k.shape == (18, HEADS, 64) and v.shape == (18, HEADS, 128)
    assert torch.equal(v, written[1][1].float())


def test_several_queries_see_what_stands_before_them():
    cache = make_cache(num_layers=1)
    cache.allocate("a", 0)
    ((k, v),) = write(cache, "a", 30)
    batch = cache.make_batch(1).update(["a"], 3)
    q = tokens(3, 9, heads=4)[None]
    out = cache.attend(0, batch, q)
    for i in range(3):
        seen = 30 - 3 + i + 1
        want, _ = oracle.attend(q[0, i], k[:seen], v[:seen])
        torch.testing.assert_close(out[0, i].float(), want, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("new", [1, 2])
def test_rows_without_a_sequence_are_not_stored_and_attend_to_nothing(new):
    """As in a graph captured at a larger batch."""
    cache = make_cache(num_layers=1)
    for name in "ab":
        cache.allocate(name, new)
    batch = cache.make_batch(4).update("ba", new, pad_to=4)
    k, v = tokens(4 * new, 1), tokens(4 * new, 2)
    cache.append(0, batch, k, v)
    out = cache.attend(0, batch, tokens(4 * new, 3, heads=4).unflatten(0, (4, new)))
    assert torch.equal(cache.read(0, "b")[0], k[:new]) and torch.equal(cache.read(0, "a")[0], k[new : 2 * new])
    assert out[:2].any() and not out[2:].any()
    used = [*cache.page_ids("a"), *cache.page_ids("b")]
    others = [page for page in range(8) if page not in used]
    assert not cache.k_pages[0, others].any() and not cache.v_pages[0, others].any()


def test_append_returns_q_if_given_one():
    cache = make_cache(num_layers=1)
    cache.allocate("a", 1)
    batch = cache.make_batch(1).update(["a"])
    q = tokens(1, heads=4)
    assert cache.append(0, batch, tokens(1), tokens(1)) is None
    rotated = cache.append(0, batch, tokens(1), tokens(1), q=q)
    assert rotated is not None and torch.equal(rotated, q)


def test_q_and_k_are_rotated_to_the_positions_of_their_tokens():
    rope = kv_cache.Rope(rotary_dim=32, interleaved=True)
    cache = make_cache(num_layers=1)
    x, q = tokens(25, 1), tokens(25, 2, heads=4)
    cache.allocate("a", 0)
    batch = cache.make_batch(1)
    rotated = []
    for begin, end in ((0, 20), (20, 24), (24, 25)):  # prefill, several tokens, one
        cache.extend("a", end - begin)
        batch.update(["a"], end - begin)
        rotated.append(cache.append(0, batch, x[begin:end], x[begin:end], q=q[begin:end], rope=rope))
    positions = torch.arange(25)
    k, v = cache.read(0, "a", torch.float32)
    torch.testing.assert_close(k, rope.apply(x.float(), positions), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(torch.cat(rotated).float(), rope.apply(q.float(), positions), atol=1e-2, rtol=1e-2)
    assert torch.equal(v, x.float())


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_pages_until_it_is_written():
    cache = make_cache()
    cache.allocate("parent", 0)
    before = write(cache, "parent", 40, seed=1)
    cache.fork("parent", "child")
    assert cache.page_ids("child") == cache.page_ids("parent") and cache.num_free_pages == 5
    after = write(cache, "child", 5, seed=2)
    assert cache.page_ids("child")[:2] == cache.page_ids("parent")[:2]
    assert cache.page_ids("child")[2] != cache.page_ids("parent")[2] and cache.num_free_pages == 4
    for layer in range(2):
        for i in range(2):
            assert torch.equal(cache.read(layer, "parent")[i], before[layer][i])
            assert torch.equal(cache.read(layer, "child")[i], torch.cat((before[layer][i], after[layer][i])))


def test_a_fork_at_a_pages_end_copies_nothing():
    cache = make_cache()
    cache.allocate("parent", 32)
    cache.fork("parent", "child")
    cache.extend("child")
    assert cache.page_ids("child")[:2] == cache.page_ids("parent") and cache.num_free_pages == 5


def test_the_last_of_a_shared_page_keeps_it():
    cache = make_cache(num_pages=4)
    cache.allocate("a", 10)
    for name in ("b", "c"):
        cache.fork("a", name)
    cache.extend_all(["a", "b", "c"])
    assert len({cache.page_ids(name) for name in "abc"}) == 3 and cache.num_free_pages == 1


def test_rejected_tokens_are_truncated_and_a_fork_keeps_its_own():
    cache = make_cache()
    cache.allocate("a", 0)
    written = write(cache, "a", 36, seed=1)
    cache.fork("a", "kept")
    cache.truncate("a", 20)
    assert cache.seq_len("a") == 20 and len(cache.page_ids("a")) == 2
    again = write(cache, "a", 2, seed=2)  # into the middle of a page that the fork still reads
    assert torch.equal(cache.read(0, "kept")[0], written[0][0])
    assert torch.equal(cache.read(0, "a")[0], torch.cat((written[0][0][:20], again[0][0])))


def test_shared_tokens_must_not_be_written():
    cache = make_cache()
    cache.allocate("a", 5)
    cache.fork("a", "b")
    batch = cache.make_batch(2).update(["a"], 5)
    with pytest.raises(
        ValueError, match="batch: got new tokens of 'a' in pages that it shares, want the sequence extended first"
    ):
        cache.append(0, batch, tokens(5), tokens(5))
    cache.attend(0, batch, tokens(1, heads=4)[None])  # reading them is what forks are for


# -- out of pages -----------------------------------------------------------------------------------------------------


def snapshot(cache):
    sequences = {seq_id: (cache.seq_len(seq_id), cache.page_ids(seq_id)) for seq_id in cache.seq_ids}
    return sequences, cache.num_free_pages, str(cache.memory_report())


def test_running_out_of_pages_changes_nothing():
    cache = make_cache(num_pages=4)
    cache.allocate("a", 30)
    cache.allocate("b", 10)
    cache.fork("b", "c")
    before = snapshot(cache)
    with pytest.raises(OutOfPagesError, match="out of pages: 2 needed, 1 free") as error:
        cache.allocate("d", 17)
    assert (error.value.needed, error.value.free) == (2, 1)
    with pytest.raises(OutOfPagesError, match="2 needed, 1 free"):
        cache.extend_all(["a", "b"], [3, 1])  # a second page, and a copy of the shared one
    with pytest.raises(OutOfPagesError, match="3 needed, 1 free"):
        cache.extend("c", 30)  # a copy of the shared page, and two more
    assert snapshot(cache) == before
    cache.extend_all(["b", "c"], 1)  # one copy: the other keeps the page
    assert cache.num_free_pages == 0
    cache.free("a")
    assert cache.num_free_pages == 2


def test_refused_changes_change_nothing():
    cache = make_cache(max_seq_len=40)
    cache.allocate("a", 30)
    before = snapshot(cache)
    for refused, message in (
        (lambda: cache.allocate("a", 1), "seq_id: got 'a', which the cache already holds"),
        (lambda: cache.allocate("b", 41), "num_tokens: got 41 tokens for 'b', want at most max_seq_len 40"),
        (lambda: cache.allocate("b", -1), "num_tokens: got -1, want at least 0"),
        (lambda: cache.extend("a", 11), "num_tokens: got 41 tokens for 'a'"),
        (lambda: cache.extend("b"), "seq_id: got 'b', want one of the cache's 1 sequences"),
        (lambda: cache.extend_all(["a", "b"]), "seq_id: got 'b'"),
        (lambda: cache.extend_all(["a", "a"]), "seq_ids: got 'a' twice"),
        (lambda: cache.extend_all(["a"], [1, 2]), "num_tokens: got 2 counts, want 1"),
        (lambda: cache.truncate("a", 31), "num_tokens: got 31, want at most 30, the length of 'a'"),
        (lambda: cache.fork("a", "a"), "new_id: got 'a', which the cache already holds"),
        (lambda: cache.fork("b", "c"), "seq_id: got 'b'"),
        (lambda: cache.free("b"), "seq_id: got 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    wrong: Any = cache
    for refused, message in (
        (lambda: wrong.extend("a", 1.5), "num_tokens: got 1.5, want an int"),
        (lambda: wrong.allocate(["b"], 1), r"seq_id: got \['b'\], want what a dict takes as a key, a str or an int"),
        (lambda: wrong.fork("a", ["b"]), r"new_id: got \['b'\], want what a dict takes"),
        (lambda: wrong.free(["a"]), r"seq_id: got \['a'\], want what a dict takes"),
        (lambda: wrong.extend(["a"]), r"seq_ids: got \['a'\], want what a dict takes"),
        (lambda: wrong.extend_all(3), "seq_ids: got 3, want a sequence of those that the cache holds"),
    ):
        with pytest.raises(TypeError, match=message):
            refused()
    assert snapshot(cache) == before


# -- scales -----------------------------------------------------------------------------------------------------------


def test_scales_are_asked_for_checked_and_kept_per_layer():
    cache = make_cache(("int8_channel", "e4m3_head"))
    batch = cache.make_batch(1)
    k_scale, v_scale = torch.rand(HEADS, DIM), torch.rand(HEADS)
    for wrong, message in (
        ({"k_scale": k_scale}, "v_scale: got None, want \\[2, 1\\] for e4m3_head"),
        ({"k_scale": k_scale[:1], "v_scale": v_scale}, "k_scale: got shape \\[1, 64\\], want \\[2, 64\\]"),
        ({"k_scale": k_scale, "v_scale": -v_scale}, "v_scale: got -0.*, want positive finite numbers"),
        ({"k_scale": 0 * k_scale, "v_scale": v_scale}, "k_scale: got 0.0, want positive finite numbers"),
        ({"k_scale": 1e-60 * k_scale.double(), "v_scale": v_scale}, "k_scale: got 0.0, want positive finite numbers"),
        ({"k_scale": k_scale, "v_scale": 1e60 * v_scale.double()}, "v_scale: got inf, want positive finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.set_scales(0, **wrong)
    with pytest.raises(ValueError, match=r"v_scale: got a tensor without data \(meta\)"):
        cache.set_scales(0, k_scale=k_scale, v_scale=v_scale.to("meta"))
    with pytest.raises(TypeError, match=r"v_scale: got dtype torch.int64, want one of torch.bfloat16"):
        cache.set_scales(0, k_scale=k_scale, v_scale=v_scale.long())
    cache.set_scales(0, k_scale=k_scale, v_scale=v_scale)
    cache.allocate("a", 1)
    batch.update(["a"])
    cache.append(0, batch, tokens(1), tokens(1))
    with pytest.raises(ValueError, match="layer: got 1, whose scales were never given"):
        cache.append(1, batch, tokens(1), tokens(1))
    with pytest.raises(ValueError, match="layer: got 1 for a cache with 1 sequences, want an empty cache"):
        cache.set_scales(1, k_scale=k_scale, v_scale=v_scale)
    k, v = cache.read(0, "a", torch.float32)
    assert torch.equal(k, stored("int8_channel", tokens(1), k_scale))
    assert torch.equal(v, stored("e4m3_head", tokens(1), v_scale[:, None]))


def test_a_format_without_given_scales_takes_none():
    with pytest.raises(ValueError, match="k_scale: got a scale, want None: int4_g4 keeps none beside the cache"):
        make_cache("int4_g4").set_scales(0, k_scale=torch.ones(()))


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"page_size": 24}, ValueError, "page_size: got 24, want a multiple of 16 from 16 to 256"),
        ({"page_size": 512}, ValueError, "page_size: got 512"),
        ({"num_pages": 0}, ValueError, "num_pages: got 0, want at least 1"),
        ({"num_layers": 1.0}, TypeError, "num_layers: got 1.0, want an int"),
        ({"max_seq_len": 0}, ValueError, "max_seq_len: got 0, want at least 1"),
        ({"v_head_dim": 65}, ValueError, "v_head_dim: got 65, want one of 64"),
        ({"cache_layout": "DHN"}, ValueError, "cache_layout: got 'DHN', want 'NHD' or 'HND'"),
        ({"kv_format": "int3"}, ValueError, "kv_format: got 'int3'"),
        ({"kv_format": ("bf16",)}, TypeError, "want the name of a format or a pair of names"),
        ({"kv_format": "fp16"}, TypeError, "kv_format: got 'fp16' for a model in torch.bfloat16"),
        ({"dtype": torch.float32}, TypeError, "dtype: got torch.float32"),
        ({"v_head_dim": 96, "kv_format": {0: "bf16", -1: ("bf16", "int8_g8")}}, ValueError, "got int8_g8 for v_cache"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        make_cache(**options)


def test_a_cache_that_attention_could_not_read_is_refused():
    with pytest.raises(ValueError, match="kv_format: got int4_g4 for k_cache, .* groups of 20 columns"):
        KVCache(2, 8, 16, HEADS, 80, kv_format="int4_g4")


def test_a_stale_batch_and_a_missing_layer_are_refused():
    cache = make_cache()
    cache.allocate("a", 1)
    batch = cache.make_batch(1)
    q = tokens(1, heads=4)[None]
    with pytest.raises(ValueError, match="batch: got one whose sequences have changed since its last update"):
        cache.attend(0, batch, q)
    cache.attend(0, batch.update(["a"]), q)
    cache.extend("a")
    with pytest.raises(ValueError, match="batch: got one whose sequences have changed"):
        cache.append(0, batch, tokens(1), tokens(1))
    with pytest.raises(ValueError, match="layer: got 2, want 0 to 1"):
        cache.attend(2, batch.update(["a"]), q)
    wrong: Any = cache
    for layer in (0.0, "0", True):
        with pytest.raises(TypeError, match=f"layer: got {layer!r}, want an int"):
            wrong.attend(layer, batch, q)
    with pytest.raises(TypeError, match="batch: got str, want a Batch, as from make_batch"):
        wrong.attend(0, "b", q)


def test_a_batch_of_another_cache_is_refused_though_its_sequences_are_alike():
    """A draft model's cache and the target's grow in step, but a sequence has other pages in each."""
    target, draft = make_cache(), make_cache()
    for cache in (target, draft):
        cache.allocate("a", 1)
    batch = target.make_batch(1).update(["a"])
    calls = (
        lambda: draft.append(0, batch, tokens(1), tokens(1)),
        lambda: draft.attend(0, batch, tokens(1, heads=4)[None]),
        lambda: draft.append_and_attend(0, batch, *(tokens(1, heads=heads)[None] for heads in (4, 2, 2))),
    )
    for call in calls:
        with pytest.raises(ValueError, match="batch: got one of another KVCache, want one of this cache's make_batch"):
            call()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_report_counts_bytes_pages_tokens_and_waste():
    cache = make_cache("int4_g4", num_pages=10, num_layers=3)
    row = 16 + DIM // 2
    cache.allocate("a", 40)
    cache.fork("a", "b")
    cache.extend("b")  # copies the third page: 8 tokens of it, and one more
    report = cache.memory_report()
    assert report.layer_bytes == (10 * 16 * HEADS * 2 * row,) * 3 and report.scale_bytes == 0
    assert sum(report.layer_bytes) == cache.k_pages.nbytes + cache.v_pages.nbytes
    assert (report.pages, report.pages_used, report.pages_free, report.pages_shared) == (10, 4, 6, 2)
    assert (report.sequences, report.tokens, report.tokens_stored) == (2, 81, 32 + 8 + 9)
    assert report.token_bytes == 3 * HEADS * 2 * row and report.token_bytes_bf16 == 3 * HEADS * 4 * DIM
    assert report.stored_bytes + report.wasted_bytes == 4 * 16 * report.token_bytes
    assert str(report).splitlines() == [
        "KV cache int4_g4: 90.00 KiB in 3 layers of 30.00 KiB; bf16 would take 240.00 KiB (2.67x)",
        "pages of 16 tokens: 4 of 10 used, 6 free, 2 shared",
        "81 tokens of 2 sequences, 49 stored in 27.56 KiB; 8.44 KiB (23.4%) of used pages unfilled",
    ]


def test_the_report_of_an_empty_cache_divides_by_nothing():
    report = make_cache(("int8_tensor", "bf16")).memory_report()
    assert report.scale_bytes == 2 * 4 and report.pages_used == report.tokens == 0
    assert "int8_tensor + bf16" in str(report) and "(0.0%)" in str(report)
