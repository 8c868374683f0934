"""What serving for hours brings: captures again and again, threads, GPUs with few SMs, streams that hold SMs."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import append_and_decode, fused_moe, quantized_linear
from cute_kernels.gemm.experts import Routing, route
from cute_kernels.gemm.wgmma.schedule import range_configs, schedule_of
from cute_kernels.kv_cache import Rope
from cute_kernels.mla import mla_decode, sparse_mla_decode
from cute_kernels.runtime import gpu
from cute_kernels.runtime.workspace import COUNTERS, POOL, WorkspacePool
from tests.attention.cases import make_call
from tests.extend.cases import make_call as make_extend_call
from tests.gpu import moe_forms
from tests.gpu.test_linear_layer import SMALL, Layer
from tests.gpu.test_linear_wgmma import launch
from tests.kv_cache.cases import Shape
from tests.kv_cache.steps import make_step
from tests.linear.cases import known, problem_of
from tests.mla import cases as mla_cases

pytestmark = pytest.mark.gpu

CUDA = "cuda"
FEW_SMS = 16  # of the smallest slice of an H100
Work = Callable[[], torch.Tensor]


def attention(kv_format: str, lengths: tuple[int, ...], **options: Any) -> Work:
    given = {name: options.pop(name) for name in ("num_splits",) if name in options}
    call = make_call(kv_format, lengths, device=CUDA, **options)
    return lambda: call.run(**given)


def step() -> Work:
    """Of an append and the attention that depends on it; again and again the same tokens."""
    shape = Shape("int4_g4", rope=Rope(128), num_q_heads=32, num_kv_heads=8, page_size=16)
    given = make_step(shape, (3000, 17, 1000, 1), 1, CUDA)
    return lambda: append_and_decode(**given)


def product(rows: int) -> Work:
    weight = known(1024, 4096, 4, 128, False, torch.bfloat16, 0).pack().to(CUDA)
    x = torch.randn(rows, 4096, device=CUDA).bfloat16()
    return lambda: quantized_linear(x, weight)


def product_in_ranges(rows: int) -> Work:
    """Of tiles of which several CTAs have a part, and each waits for those before it."""
    case = replace(problem_of(rows, 1160, 4096), num_sms=gpu.GPU.num_sms(CUDA))
    schedules = [schedule for config in range_configs(case) if (schedule := schedule_of(case, config)) is not None]
    weight = known(1160, 4096, 4, 128, False, torch.bfloat16, 0).pack().to(CUDA)
    x = torch.randn(rows, 4096, device=CUDA).bfloat16()
    return lambda: torch.cat([launch(schedule, weight, x) for schedule in schedules])


def experts(tokens: int) -> Work:
    form = moe_forms.FORMS["w4"]
    layer, (x, ids, shares) = moe_forms.layer(form), moe_forms.call(form, tokens)
    return lambda: fused_moe(x, *layer, shares, ids)


def router(tokens: int) -> Work:
    hidden, weight = (torch.randn(rows, 2048, device=CUDA).bfloat16() for rows in (tokens, 256))
    return lambda: torch.cat([each.float() for each in route(hidden, weight, Routing(8, renormalize=True))])


def mla(sparse: bool) -> Work:
    if sparse:
        call: Any = mla_cases.make_sparse(
            "mla_fp8", batch=1, q_len=1, num_heads=64, topk=2048, num_pages=80, page_size=64, deviation=0.1
        )
        call = mla_cases.moved(call, CUDA)
        return lambda: sparse_mla_decode(*call.tensors, kv_format=call.kv_format, **call.options)
    dense: Any = mla_cases.make_dense("mla_bf16", [5000, 300, 2000], num_heads=64, page_size=64, deviation=0.1)
    dense = mla_cases.moved(dense, CUDA)
    tensors = {name: getattr(dense, name) for name in ("q", "cache", "seq_lens", "block_table")}
    return lambda: mla_decode(**tensors, kv_format=dense.kv_format)


def products_of_a_layer() -> Work:
    """In one launch, whose words are not EMPTY between launches: which of two sets is next is kept there."""
    layer = Layer(SMALL, 1)

    def work() -> torch.Tensor:
        found = layer.run_public()
        assert found.qkv is not None
        return torch.cat((found.rows.rows, found.qkv), -1)

    return work


def extend(kv_format: str, q_lens: tuple[int, ...], lengths: tuple[int, ...]) -> Work:
    """Over keys that the launch's producer warps unpack, as there are so many queries."""
    call = make_extend_call(kv_format, q_lens, lengths, num_kv_heads=8, unpack=True, device=CUDA)
    return lambda: call.run()


CUT: dict[str, Callable[[], Work]] = {
    "one row, every head combines": lambda: attention("int4_g4", (16000,), num_kv_heads=8, group=4),
    "one row, more parts than SMs": lambda: attention("int4_g4", (16000,), num_kv_heads=8, group=4, num_splits=64),
    "pages, lengths differ": lambda: attention("int4_g1", (9000, 3, 700, 64), num_kv_heads=1, page_size=64),
    "many heads, lengths differ": lambda: attention("bf16", (9000, 40, 100), num_kv_heads=32, group=1, page_size=64),
    "append and attention": step,
    "product of 1 row": lambda: product(1),
    "product of 200 rows": lambda: product(200),
    "product in ranges": lambda: product_in_ranges(200),
    "products of a layer": products_of_a_layer,
    "experts": lambda: experts(16),
    "router": lambda: router(64),
    "MLA": lambda: mla(False),
    "sparse MLA": lambda: mla(True),
    "keys unpacked meanwhile": lambda: extend("int4_g4", (900,), (9000,)),
    "keys with a scale a row unpacked meanwhile": lambda: extend("int8_token_head", (600,), (5000,)),
}


# -- few SMs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_sms():
    """Every family plans for a GPU of `FEW_SMS` SMs."""
    with gpu.standing_in(gpu.Gpu(num_sms=lambda device: FEW_SMS)):
        yield


@pytest.mark.parametrize("name", CUT)
def test_a_launch_ends_though_few_sms_are_free(name, few_sms):
    """All but `FEW_SMS` are held, so that most CTAs begin when others have ended; nothing hangs, and no bit changes."""
    from tests.gpu.holder import ends_meanwhile, held

    work, stream = CUT[name](), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wanted = work().clone()
        results = [work() for _ in range(3)]  # memory is there before SMs are held: allocating would wait for them
    torch.cuda.synchronize()
    del results
    with held(_num_sms() - FEW_SMS):
        with torch.cuda.stream(stream):
            results = [work() for _ in range(3)]
        ended = ends_meanwhile(stream)
    torch.cuda.synchronize()
    assert ended, "a CTA waits for another one that has no SM"
    assert all(torch.equal(result, wanted) for result in results)


def _num_sms() -> int:
    """As the driver says, whatever plans believe."""
    from cuda.bindings import runtime  # pyright: ignore[reportAttributeAccessIssue]

    attribute = runtime.cudaDeviceAttr.cudaDevAttrMultiProcessorCount
    return int(runtime.cudaDeviceGetAttribute(attribute, torch.cuda.current_device())[1])


# -- captures ----------------------------------------------------------------------------------------------------------


def test_a_thousand_captures_leave_memory_as_it_was():
    """Each graph is replayed and dropped; every tenth is kept for a while, replayed, and checked."""
    works = [CUT["pages, lengths differ"](), product(1), attention("bf16", (3000, 50), num_splits=7)]
    works.append(products_of_a_layer())
    wanted = [work() for work in works]
    torch.cuda.synchronize()
    kept: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = []
    marks = []
    for i in range(1000):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [work() for work in works]
        graph.replay()
        if i % 10 == 0:
            kept = [*kept[-3:], (graph, outputs)]
            for old, found in kept:
                old.replay()
                for work, want in zip(works, wanted, strict=True):
                    assert torch.equal(work(), want), "a launch of the stream between those of graphs"
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        del graph, outputs
        if i in (200, 999):
            gc.collect()
            torch.cuda.synchronize()
            free, _ = torch.cuda.mem_get_info()
            marks.append((free, torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    assert marks[1][1] <= marks[0][1], "memory that torch has given out"
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the memory of other workers counts as well
        assert marks[0][0] - marks[1][0] <= 64 << 20, "memory of the GPU"
    assert marks[1][2] - marks[0][2] <= 64 << 10, "KiB of the host"
    assert len(POOL._pieces) <= 8 * len(works) and len(COUNTERS._pieces) <= 8


def test_captures_without_a_launch_before_them_are_not_held():
    """The graph fills its own memory, and torch frees it with the graph."""
    pool = WorkspacePool()
    work = attention("bf16", (3000, 50), num_splits=7)
    wanted = work()  # with the workspaces of all: the pool has seen no launch
    marks = []
    with gpu.standing_in(gpu.Gpu(workspace=pool.get)):
        for i in range(60):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = work()
            for _ in range(2):
                out.fill_(torch.nan)
                graph.replay()
                assert torch.equal(out, wanted)
            del graph, out
            if i in (20, 59):
                torch.cuda.synchronize()
                marks.append(torch.cuda.memory_allocated())
    assert marks[1] <= marks[0] and not pool._pieces and pool._by_capture


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_stream", [True, False], ids=["of one stream", "of a stream each"])
def test_threads_do_not_disturb_each_other(one_stream):
    """Eight threads, as those of two engines: plans are made, scratch grows, and every result is that of one thread."""
    makers = [CUT[name] for name in ("pages, lengths differ", "append and attention", "product of 1 row", "MLA")]
    makers.append(lambda: attention("int4_g1", (4000,) * 40, num_kv_heads=1, num_splits=3))
    makers.append(products_of_a_layer)
    works = [make() for make in makers]
    wanted = [work().clone() for work in works]
    torch.cuda.synchronize()
    gpu.forget()
    for pool in (POOL, COUNTERS):
        pool._by_stream.clear()
    shared, failures = torch.cuda.Stream(), []
    start = threading.Barrier(8)

    def serve(number: int) -> None:
        stream = shared if one_stream else torch.cuda.Stream()
        start.wait()
        with torch.cuda.stream(stream):
            for turn in range(40):
                which = (number + turn) % len(works)  # a step writes what is there already
                found = works[which]()
                if not torch.equal(found, wanted[which]):
                    failures.append((number, turn, which))
        stream.synchronize()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
