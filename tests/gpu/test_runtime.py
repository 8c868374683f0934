"""Kernels from the cache and from a bundle run on the GPU, on torch's current stream and inside CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_kernels.runtime import KernelCache, aot, aot_build, arch_of, default_cache, native
from cute_kernels.runtime.captures import graph_of
from cute_kernels.runtime.memory import blank, empty_strided
from tests.runtime.tiny import TinyConfig, TinySpec

SPEC = TinySpec(TinyConfig(scale=3.0))

compiles = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")


def specs() -> list[TinySpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    return [SPEC]


@pytest.fixture(scope="module", params=[pytest.param("compiled", marks=compiles), "disk", "bundle"])
def function(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The kernel as each way of loading hands it out."""
    directory = tmp_path_factory.mktemp(request.param)
    cache = KernelCache(directory / "cache")
    if request.param != "compiled":
        compiled_before()
    if request.param == "bundle":
        aot_build.build([SPEC], arch_of(), directory / "bundle", cache=default_cache())
        cache = KernelCache(directory / "empty", [aot.open_bundle(directory / "bundle")])
    elif request.param == "disk":
        cache = KernelCache(default_cache().store.root)
    loaded, source = cache.load_from(SPEC, arch_of())
    assert source == request.param
    return loaded


def compiled_before() -> None:
    """The kernel in the disk cache, from before or compiled now."""
    try:
        default_cache().artifact(SPEC, arch_of())
    except native.CompilerMissingError as error:
        pytest.skip(f"{error}; `python -m tests.gpu.prepare` puts it into a cache")


@pytest.mark.parametrize("size", [4, 1000, 1 << 20])
def test_the_kernel_computes(function, size: int):
    x = torch.randn(size, device="cuda")
    y = torch.full_like(x, float("nan"))
    function(x, y)
    torch.testing.assert_close(y, 3 * x)


def test_it_runs_on_the_current_stream_and_in_a_graph(function):
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    function(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(x, y)
    x.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(y, torch.full_like(y, 6.0))


@compiles
def test_the_cached_kernel_is_the_compiled_one(tmp_path: Path):
    cache = KernelCache(tmp_path)
    first = cache.artifact(SPEC, arch_of())
    assert KernelCache(tmp_path).artifact(SPEC, arch_of()) == first


@pytest.mark.parametrize("shape", [(2, 3, 64), (1,), (0, 4), (5, 0, 2)], ids=str)
def test_results_are_allocated_as_torch_does(shape: tuple[int, ...]):
    made = empty_strided(*blank(shape, torch.bfloat16))
    want = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    assert (made.shape, made.stride(), made.dtype, made.device) == (want.shape, want.stride(), want.dtype, want.device)
    assert made.is_contiguous() and not made.requires_grad


def item_of_a_product(x: torch.Tensor) -> float:
    return (x * 2).sum().item()


def error_behind_a_product(x: torch.Tensor) -> None:
    raise ValueError(f"operation not permitted: {(x * 2).shape}")


@pytest.mark.parametrize("bad", [item_of_a_product, error_behind_a_product])
def test_a_capture_that_fails_leaves_torch_as_it_was(bad):
    device, aside = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    x, stream = torch.ones(4, device=device), torch.cuda.current_stream()
    with pytest.raises((RuntimeError, ValueError), match="operation not permitted"):
        graph_of(lambda: bad(x), device)
    assert torch.cuda.current_stream() == stream
    assert torch.randn(4, device=device).isfinite().all(), "drawn without a graph"

    before = torch.cuda.memory_allocated()
    used = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    used.record_stream(aside)
    del used
    torch.cuda.synchronize()
    small = torch.empty(4, device=device)  # asks which blocks streams have done with
    assert torch.cuda.memory_allocated() <= before + (1 << 20), small.shape

    graph, product = graph_of(lambda: x * 3, device)
    x.fill_(5)
    graph.replay()
    assert product.tolist() == [15.0] * 4
