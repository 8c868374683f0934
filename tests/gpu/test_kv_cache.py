"""`KVCache` on a GPU: the same bytes as on a CPU, updates that never wait, graphs that serve changing batches."""

import pytest
import torch

from cute_kernels.kv_cache import KVCache, compute_kv_scale, smooth_keys
from cute_kernels.runtime import arch_of, load_many
from tests.gpu.specs import needed_by

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, Q_HEADS, DIM = 2, 24, 16, 2, 8, 128
FORMATS = ["bf16", "int4_g4", ("int8_token_head", "int4_g1"), ("int8_channel", "e4m3_head")]


def make_cache(kv_format, device):
    cache = KVCache(LAYERS, PAGES, PAGE_SIZE, KV_HEADS, DIM, kv_format=kv_format, max_seq_len=160, device=device)
    if kv_format == ("int8_channel", "e4m3_head"):
        for layer in range(LAYERS):
            samples = torch.randn(100, KV_HEADS, DIM, generator=torch.Generator().manual_seed(layer))
            k_scale, v_scale = (compute_kv_scale(samples, kv_format=name) for name in kv_format)
            cache.set_scales(layer, k_scale=k_scale, v_scale=v_scale)
    return cache


def step(cache, batch, q, k, v):
    """All layers of one step; the outputs of attention, [LAYERS, batch, q_len, Q_HEADS, DIM]."""
    outs = []
    for layer in range(LAYERS):
        rotated = cache.append(layer, batch, k[layer], v[layer], q=q.flatten(0, 1))
        outs.append(cache.attend(layer, batch, rotated.unflatten(0, q.shape[:2])))
    return torch.stack(outs)


def inputs(rows, q_len, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, q_len, Q_HEADS, DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, LAYERS, rows * q_len, KV_HEADS, DIM, generator=generator).bfloat16()
    return q, k, v


def take_steps(kv_format, devices):
    """Prefill, decode, a fork and several queries: the same on each device; the caches, with sequences "b" and "c"."""
    caches = {device: make_cache(kv_format, device) for device in devices}
    batches = {device: cache.make_batch(4) for device, cache in caches.items()}

    def run(names, q_len, seed):
        outs = []
        for device, cache in caches.items():
            cache.extend_all(names, q_len)
            batches[device].update(names, q_len)
            given = (x.to(device) for x in inputs(len(names), q_len, seed))
            outs.append(step(cache, batches[device], *given).cpu().float())
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], atol=2e-2, rtol=1e-2)

    for cache in caches.values():
        for name in "ab":
            cache.allocate(name, 0)
    run(["a", "b"], 13, seed=1)
    run(["a", "b"], 7, seed=2)
    for cache in caches.values():
        cache.fork("a", "c")
    run(["c", "a", "b"], 1, seed=3)  # the shared last page is copied
    for cache in caches.values():
        cache.truncate("b", 9)
        cache.free("a")
    run(["b", "c"], 4, seed=4)
    return caches


def specs():
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""

    def work():
        for kv_format in FORMATS:
            take_steps(kv_format, ("cpu",))
            cache = make_cache(kv_format, "cpu")
            batch = cache.make_batch(4)
            for length, name in enumerate("abcd"):
                cache.allocate(name, 14 + length)
            prepare(cache, batch, "abcd")
            step(cache, batch, *inputs(4, 1, seed=0))

    return needed_by(work)


@pytest.fixture(scope="module")
def kernels():
    load_many(specs(), arch_of())


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_the_same_steps_leave_the_same_bytes_as_on_a_cpu(kv_format, kernels):
    caches = take_steps(kv_format, ("cpu", "cuda"))
    for layer in range(LAYERS):
        for name in "bc":
            for here, there in zip(*(caches[d].read(layer, name, torch.float32) for d in ("cuda", "cpu")), strict=True):
                assert torch.equal(here.cpu(), there)


def test_updating_a_batch_never_waits_for_the_gpu():
    cache = make_cache("int4_g4", "cuda")
    for name in "abc":
        cache.allocate(name, 15)
    batch = cache.make_batch(4)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.update("abc")
        cache.fork("a", "d")
        cache.extend_all("abcd", 2)
        batch.update("dcb", [2, 1, 0], pad_to=4)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert batch.seq_lens.tolist() == [17, 17, 17, 0]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 2, 3, 3, 3]
    for row, name in enumerate("dcb"):
        pages = list(cache.page_ids(name))
        assert batch.block_table[row].tolist() == pages + [-1] * (batch.max_pages - len(pages))


def prepare(cache, batch, names):
    """A decoding step of up to 4 sequences."""
    cache.extend_all(names)
    batch.update(names, pad_to=4)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_one_graph_serves_steps_that_change_pages_and_members(kv_format, kernels):
    caches = [make_cache(kv_format, "cuda") for _ in range(2)]
    batches = [cache.make_batch(4) for cache in caches]
    for cache in caches:
        for length, name in enumerate("abcd"):
            cache.allocate(name, 14 + length)
    static = [x.cuda() for x in inputs(4, 1, seed=0)]

    prepare(caches[0], batches[0], "abcd")
    step(caches[0], batches[0], *static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(caches[0], batches[0], *static)
    prepare(caches[1], batches[1], "abcd")
    step(caches[1], batches[1], *static)
    for number, names in enumerate(("abcd", "abcd", "dca", "bd", "b", "abcd")):
        for x, new in zip(static, inputs(4, 1, seed=number), strict=True):
            x.copy_(new)
        for cache, batch in zip(caches, batches, strict=True):
            prepare(cache, batch, names)
        graph.replay()
        want = step(caches[1], batches[1], *static)
        assert torch.equal(out, want)
        assert not out[:, len(names) :].any()
    for layer in range(LAYERS):
        for name in "abcd":
            for mine, theirs in zip(*(cache.read(layer, name) for cache in caches), strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("method", ["absmax", "percentile"])
@pytest.mark.parametrize("name", ["int8_tensor", "int8_head", "int8_channel", "e4m3_tensor", "e4m3_head"])
def test_scales_are_the_same_as_on_a_cpu(name, method):
    x = torch.randn(3000, KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
    here, there = (compute_kv_scale(x.to(device), kv_format=name, method=method) for device in ("cuda", "cpu"))
    assert torch.equal(here.cpu(), there)


def test_factors_are_the_same_as_on_a_cpu():
    k, q = torch.randn(500, KV_HEADS, DIM), torch.randn(500, Q_HEADS, DIM)
    torch.testing.assert_close(smooth_keys(k.cuda(), q.cuda()).cpu(), smooth_keys(k, q), rtol=1e-5, atol=0)


def test_the_accuracy_bench_runs_on_the_gpu(tmp_path):
    from bench import record as records
    from bench.__main__ import main

    path = tmp_path / "accuracy.json"
    assert main(["accuracy", "--quick", "--device", "cuda", "--no-decode", "--json", str(path)]) == 0
    assert records.load(path)["environment"]["gpu"]
