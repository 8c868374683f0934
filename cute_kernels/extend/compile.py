"""From a configuration to a compiled function; the only module of this room that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cute_kernels import attention
from cute_kernels.attention.features import Features
from cute_kernels.extend.config import CombineConfig, ExtendConfig, UnpackConfig
from cute_kernels.extend.schedule import ExtendProblem, choose, choose_unpacked
from cute_kernels.kv_formats import modules_of, sources_of
from cute_kernels.runtime.spec import KernelSpec, check_config, compile_options

SHIPPED_FORMATS = ("bf16", "int8_token_head", "e4m3_token_head", "e4m3_tensor", "int4_g1", "int4_g4")
CAUSAL_PAGES = Features(causal=True, paged=True)


@dataclass(frozen=True, eq=False)
class ExtendSpec(KernelSpec):
    """One extend attention kernel: the function takes what :meth:`ExtendKernel.__call__` describes, on torch's current
    stream."""

    config: ExtendConfig
    family: ClassVar[str] = "extend"

    @property
    def symbol(self) -> str:
        return self.config.name

    def source_roots(self) -> tuple[Path, ...]:
        attention_room = Path(attention.__file__).resolve().parent
        files = [attention_room / "config.py", attention_room / "features.py", attention_room / "tiles.py"]
        return *super().source_roots(), *sources_of(self.config.k_format, self.config.v_format), *files

    def modules(self) -> tuple[str, ...]:
        return modules_of(self.config.k_format, self.config.v_format)

    def compile(self, arch: str) -> Any:
        return compile_extend(self.config, arch)


@dataclass(frozen=True, eq=False)
class UnpackSpec(KernelSpec):
    """What makes rows of 16 bits of a cache: the function takes what :meth:`UnpackKernel.__call__` describes."""

    config: UnpackConfig
    family: ClassVar[str] = "extend"

    @property
    def symbol(self) -> str:
        return self.config.name

    def source_roots(self) -> tuple[Path, ...]:
        return *super().source_roots(), *sources_of(self.config.k_format, self.config.v_format)

    def modules(self) -> tuple[str, ...]:
        return modules_of(self.config.k_format, self.config.v_format)

    def compile(self, arch: str) -> Any:
        return compile_unpack(self.config, arch)


@dataclass(frozen=True, eq=False)
class CombineSpec(KernelSpec):
    """What puts splits together: the function takes what :meth:`CombineKernel.__call__` describes."""

    config: CombineConfig
    family: ClassVar[str] = "extend"

    @property
    def symbol(self) -> str:
        return self.config.name

    def compile(self, arch: str) -> Any:
        return compile_combine(self.config, arch)


def shipped_specs() -> list[KernelSpec]:
    """What bundles hold and the gates compile: causal calls over pages of 64 tokens. Others compile on demand."""
    problems = [ExtendProblem(128, name, name, "bf16", 64, CAUSAL_PAGES) for name in SHIPPED_FORMATS]
    problems += [ExtendProblem(64, "bf16", "bf16", "bf16", 64, CAUSAL_PAGES)]
    problems += [ExtendProblem(128, "bf16", "bf16", "bf16", 16, CAUSAL_PAGES)]
    combines = [CombineConfig("bf16", head_dim) for head_dim in (64, 128)]
    loading = [choose(problem) for problem in problems]
    unpacked = [choose_unpacked(config) for config in loading if config.coded or config.page_tokens == 16]
    attention = dict.fromkeys((*loading, *(config for _, config in unpacked)))
    unpacking = [UnpackSpec(config) for config, _ in unpacked]
    return [*map(ExtendSpec, attention), *unpacking, *map(CombineSpec, combines)]


def compile_extend(config: ExtendConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.extend.kernel import ExtendKernel

    check_config(config)
    float_type = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}

    def tensor(dtype, shape, align):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    total_q, q_heads, blocks, outer, inner, batch, ends = (cute.sym_int() for _ in range(7))
    queries = [tensor(float_type[config.q_dtype], (total_q, q_heads, config.head_dim), 16) for _ in range(2)]

    def cache(form):
        if config.cache_type is None:
            return _fake_cache((blocks, outer, inner), cutlass.Uint8, form.row_elements(config.head_dim), 4)
        return _fake_cache((blocks, outer, inner), float_type[config.cache_type], config.head_dim, 16)

    lengths = [tensor(cutlass.Int32, (count,), 4) for count in (ends, batch)]
    results = [*[Int64(0)] * 4, Int32(0)]
    scales = [Int64(0), Int64(0), Int32(0), Int32(0), Float32(1.0)]
    features = [Int64(0), Int32(0), Int32(0), Float32(1.0), Int64(0), Int64(0)]
    features += [Int64(0), Int32(0), Int32(1), Int64(0), Int64(0), Int32(1)]
    return cute.compile(
        ExtendKernel(config),
        queries[0],
        *map(cache, config.formats),
        *lengths,
        queries[1],
        *results,
        *scales,
        *features,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch, *options),
    )


def _fake_cache(shape: tuple[Any, ...], dtype: Any, row: int, align: int) -> Any:
    """A cache of such a shape, whose rows are aligned and without gaps."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = [cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in range(3)]
    return make_fake_tensor(dtype, (*shape, row), stride=(*strides, 1), assumed_align=align)


def compile_unpack(config: UnpackConfig, arch: str, *options: str) -> Any:
    """As :func:`compile_extend`, for the kernel that makes rows of 16 bits of a cache."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.extend.unpack import UnpackKernel

    check_config(config)
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[config.dtype]
    blocks, outer, inner, requests, heads, room, ends, batch = (cute.sym_int() for _ in range(8))

    def cache(form):
        row, coded = form.row_elements(config.head_dim), form.is_coded
        return _fake_cache((blocks, outer, inner), cutlass.Uint8 if coded else dtype, row, 4 if coded else 16)

    rows = [
        make_fake_compact_tensor(
            dtype, (requests, heads, room, config.head_dim), stride_order=(3, 2, 1, 0), assumed_align=16
        )
        for _ in range(2)
    ]
    lengths = [
        make_fake_compact_tensor(cutlass.Int32, (count,), stride_order=(0,), assumed_align=4) for count in (ends, batch)
    ]
    return cute.compile(
        UnpackKernel(config),
        *map(cache, config.formats),
        *rows,
        *lengths,
        *[Int64(0)] * 2,
        *[Int32(1)] * 6,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch, *options),
    )


def compile_combine(config: CombineConfig, arch: str, *options: str) -> Any:
    """As :func:`compile_extend`, for the kernel that puts splits together."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.extend.combine import CombineKernel

    check_config(config)
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[config.q_dtype]
    total_q, q_heads, ends = (cute.sym_int() for _ in range(3))
    out = make_fake_compact_tensor(dtype, (total_q, q_heads, config.head_dim), stride_order=(2, 1, 0), assumed_align=16)
    return cute.compile(
        CombineKernel(config),
        out,
        make_fake_compact_tensor(cutlass.Int32, (ends,), stride_order=(0,), assumed_align=4),
        *[Int64(0)] * 3,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch, *options),
    )
