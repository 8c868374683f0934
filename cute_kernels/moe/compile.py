"""From configurations to compiled functions; the only module of this room that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cute_kernels.linear import compile as linear
from cute_kernels.linear.config import LinearConfig
from cute_kernels.moe.config import CombineConfig, RoutingConfig
from cute_kernels.moe.schedule import GroupedProblem, make_schedule
from cute_kernels.runtime.spec import KernelSpec, compile_options

NUM_ADDRESSES, NUM_INTEGERS = 8, 12  # of a grouped product, after x
MODELS = ((8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048))  # experts, topk, hidden, intermediate
TOKENS = (1, 8, 32, 128)


def _modules(*names: str) -> tuple[Path, ...]:
    return tuple(Path(__file__).resolve().parent / f"{name}.py" for name in names)


@dataclass(frozen=True, eq=False)
class GroupedSpec(KernelSpec):
    """One grouped weight-only GEMM kernel: takes what `GroupedKernel.__call__` describes, on torch's current stream."""

    config: LinearConfig
    family: ClassVar[str] = "moe"

    @property
    def symbol(self) -> str:  # type: ignore[override]
        return f"grouped_{self.config.name}"

    def source_roots(self) -> tuple[Path, ...]:
        return *_modules("compile", "kernel", "schedule", "work"), *linear.LinearSpec(self.config).source_roots()

    def compile(self, arch: str) -> Any:
        return compile_grouped(self.config, arch)


@dataclass(frozen=True, eq=False)
class RoutingSpec(KernelSpec):
    """The kernel that sorts assignments: takes what `RoutingKernel.__call__` describes; ids are int32 or int64.

    ``config`` says which.
    """

    config: RoutingConfig
    family: ClassVar[str] = "moe"

    @property
    def symbol(self) -> str:  # type: ignore[override]
        return self.config.name

    def source_roots(self) -> tuple[Path, ...]:
        return _modules("compile", "config", "routing")

    def compile(self, arch: str) -> Any:
        return compile_routing(self.config, arch)


@dataclass(frozen=True, eq=False)
class CombineSpec(KernelSpec):
    """The kernel that adds up results: takes what `CombineKernel.__call__` describes."""

    config: CombineConfig
    family: ClassVar[str] = "moe"

    @property
    def symbol(self) -> str:  # type: ignore[override]
        return self.config.name

    def source_roots(self) -> tuple[Path, ...]:
        return _modules("compile", "config", "combine")

    def compile(self, arch: str) -> Any:
        return compile_combine(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold and the gates compile: 4 bits in groups of 128, bf16; others compile on demand."""
    configs: dict[LinearConfig, None] = {}
    for experts, topk, hidden, inner in MODELS:
        for tokens in TOKENS:
            for n, k in ((2 * inner, hidden), (hidden, inner)):
                problem = GroupedProblem(tokens * topk, experts, n, k, k, 4, "bf16", 128)
                configs[make_schedule(problem).config] = None
    small: list[KernelSpec] = [RoutingSpec(RoutingConfig(bits)) for bits in (32, 64)]
    small += [CombineSpec(CombineConfig(dtype)) for dtype in ("bf16", "fp16")]
    return [*small, *(GroupedSpec(config) for config in configs)]


def _check(config: Any) -> None:
    reason = config.can_implement()
    if reason is not None:
        raise ValueError(f"config: {reason} ({config})")


def compile_grouped(config: LinearConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.moe.kernel import GroupedKernel

    _check(config)
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[config.dtype]
    shape = (cute.sym_int(), cute.sym_int(divisibility=8))
    return cute.compile(
        GroupedKernel(config),
        make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16),
        *[cutlass.Int64(0)] * NUM_ADDRESSES,
        *[cutlass.Int32(1)] * NUM_INTEGERS,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch, *options),
    )


def compile_routing(config: RoutingConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.moe.routing import RoutingKernel

    _check(config)
    dtype = cutlass.Int64 if config.id_bits == 64 else cutlass.Int32
    shape = (cute.sym_int(), cute.sym_int())
    return cute.compile(
        RoutingKernel(config),
        make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=config.id_bits // 8),
        *[cutlass.Int64(0)] * 3,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch, *options),
    )


def compile_combine(config: CombineConfig, arch: str, *options: str) -> Any:
    """As `compile_grouped`."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.moe.combine import CombineKernel

    _check(config)
    shape = (cute.sym_int(), cute.sym_int())
    return cute.compile(
        CombineKernel(config),
        make_fake_compact_tensor(cutlass.Float32, shape, stride_order=(1, 0), assumed_align=16),
        *[cutlass.Int64(0)] * 3,
        *[cutlass.Int32(1)] * 2,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch, *options),
    )
