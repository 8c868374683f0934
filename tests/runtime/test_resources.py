"""Resources are read from the machine code: checked on kernels whose code is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import demo
from cute_kernels.runtime import KernelCache, compile_options
from cute_kernels.runtime.artifact import Launch, launches_in
from cute_kernels.runtime.doctor import ToolMissingError, find_tool
from tests import golden
from tests.runtime.conftest import ARCH
from tests.runtime.tiny import NUM_THREADS, TinyConfig, TinySpec, tiny_specs
from tools import resources
from tools.resources import KernelResources, cubins_in, resource_report

# One of the test kernels is launched with a block size that is not known at compile time.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamic variable in block size")


def compile_host(host: Any, folder: Path, *arguments: Any) -> Any:
    """Compiles a host function over two float tensors, its CUBIN kept."""
    import cutlass
    from cutlass import cute

    x = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(divisibility=4),), assumed_align=16)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = compile_options(ARCH, "--keep-cubin", f"--dump-dir {folder}")
    return cute.compile(host, x, x, *arguments, stream, options=options)


@pytest.fixture(scope="module")
def two_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import cutlass

    from tests.runtime.tiny_kernel import two_launches_host

    return compile_host(two_launches_host, tmp_path_factory.mktemp("cubin"), cutlass.Int32(64))


def test_a_small_kernel_uses_what_its_source_says(warm_cache: KernelCache):
    (report,) = resource_report(warm_cache.artifact(tiny_specs(2)[1], ARCH))
    assert resources.short_name(report.kernel) == "scale_kernel"
    assert 8 <= report.registers <= 32
    assert (report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (0, 0, 0)
    assert report.dynamic_smem_bytes == 4 * 256
    assert report.threads == NUM_THREADS
    wanted = {"BAR": 1, "LDG": 1, "STS": 1, "LDS": 1, "STG": 1}
    assert wanted.items() <= report.opcodes.items()
    assert "LDL" not in report.opcodes and "HMMA" not in report.opcodes


def test_local_memory_is_seen_to_the_byte(two_kernels: Any):
    """256 floats in local memory: each stored once, one of them loaded."""
    report = resource_report(two_kernels)[1]
    assert report.stack_bytes >= 1024
    assert (report.spill_store_bytes, report.spill_load_bytes) == (1024, 4)
    assert report.opcodes["STL"] == 64 and report.opcodes["LDL"] == 1


def test_kernels_come_in_launch_order_with_their_own_shared_memory(two_kernels: Any):
    first, second = resource_report(two_kernels)
    assert [resources.short_name(item.kernel) for item in (first, second)] == ["scale_kernel", "local_array_kernel"]
    assert (first.dynamic_smem_bytes, first.threads) == (2048, NUM_THREADS)
    assert (second.dynamic_smem_bytes, second.threads) == (4096, None)  # a block size given at run time


def test_objects_libraries_and_cubins_report_the_same_code(warm_directory: Path, warm_cache: KernelCache):
    spec = tiny_specs(1)[0]
    folder = next(warm_directory.glob(f"tiny/{spec.symbol}-*"))
    cubin = cubins_in((folder / "kernel.o").read_bytes())[0]
    reports = [resource_report(item)[0] for item in (folder / "kernel.o", folder / "kernel.so", cubin)]
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].opcodes == resource_report(warm_cache.artifact(spec, ARCH))[0].opcodes
    assert reports[0].dynamic_smem_bytes is None  # only the host code knows


def test_cubins_are_cut_out_whole(two_kernels: Any):
    cubin = two_kernels.artifacts.CUBIN
    assert cubins_in(b"before" + cubin + b"between" + cubin + b"after") == [cubin, cubin]
    assert cubins_in(b"\x7fELF no device code") == []


def test_what_holds_no_machine_code_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no CUBIN found in 5 bytes"):
        resource_report(b"empty")
    with pytest.raises(TypeError, match="source must be an Artifact, .* got 3"):
        resource_report(3)


def test_a_missing_tool_names_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissingError, match="pip install nvidia-cuda-nvdisasm"):
        find_tool.__wrapped__("nvdisasm")


def test_host_code_without_launches_has_none():
    assert launches_in("llvm.func @host() {\n llvm.return\n}") == ()


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("kernel_cutlass_scale_kernel_tensorptrf32gmemalign16odiv41_20_256_0", "scale_kernel"),
        (
            "kernel_cutlass_combine_cute_kernelsattentionkernelDecodeKernel_object_at__tensorptr_0",
            "DecodeKernel.combine",
        ),
        ("something_else", "something_else"),
    ],
)
def test_kernels_are_named_as_their_authors_named_them(mangled: str, name: str):
    assert resources.short_name(mangled) == name


def test_a_table_shows_each_kernel_on_a_line():
    kernel = KernelResources("kernel_cutlass_decode_tensorptr", 168, 0, 8, 4, 1024, 2048, 384, 1000, {"HGMMA": 64})
    lines = demo.format_report({"one": [kernel], "two": [kernel, kernel]}).splitlines()
    assert len(lines) == 4 and lines[2].startswith("two/decode ")
    assert lines[1].split()[:6] == ["one", "168", "0", "12", "3072", "1000"] and lines[1].endswith("HGMMA:64")


def test_a_difference_is_told_in_words(warm_cache: KernelCache):
    (small, large) = golden.measure(tiny_specs(2), warm_cache).values()
    assert "scale_kernel: dynamic_smem_bytes 512 -> 1024 (+512)" in golden.differences(small, large)
    spilling = [{**small[0], "opcodes": {**small[0]["opcodes"], "STL": 4}}]
    assert golden.differences(small, spilling) == ["scale_kernel: STL 0 -> 4 (+4)"]
    assert golden.differences(small, []) == ["kernels ['scale_kernel'] -> []"]


def test_a_changed_kernel_is_seen(tmp_path: Path):
    """The gate's purpose: another constant, another program."""
    one, other = TinySpec(TinyConfig(scale=2.0)), TinySpec(TinyConfig(scale=3.0))
    measured = golden.measure([one, other], KernelCache(tmp_path))
    lines = golden.differences(measured[one.symbol], measured[other.symbol])
    assert sorted(line.split()[1] for line in lines) == ["FADD", "FMUL"]  # x * 2 is x + x


def test_the_kernel_of_a_launch_is_the_one_whose_handle_it_loads():
    config = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    lines = ["llvm.func @host(%arg0: i64) {", "%0 = llvm.mlir.constant(32 : i32) : i32"]
    for axis in range(3):
        lines += [f"%{axis + 2} = llvm.getelementptr %1[0, 1, {axis}] : (!llvm.ptr) -> !llvm.ptr, {config}"]
        lines += [f"llvm.store %0, %{axis + 2} : i32, !llvm.ptr"]
    lines += [f"%5 = llvm.getelementptr %1[0, 2] : (!llvm.ptr) -> !llvm.ptr, {config}"]
    lines += ["llvm.store %arg0, %5 : i64, !llvm.ptr"]
    lines += ["%6 = llvm.mlir.addressof @kernels_mine : !llvm.ptr"]
    lines += ["%7 = llvm.call @_cudaLaunchKernelEx(%1, %6, %1) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32"]
    assert launches_in("\n".join(lines)) == (Launch("mine", None, 32**3),)
