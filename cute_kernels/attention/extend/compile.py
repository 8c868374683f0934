"""From a configuration to a compiled function; the only module of this room that starts the compiler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.attention.extend.arguments import COMBINE, UNPACK, attention_arguments
from cute_kernels.attention.extend.config import CombineConfig, ExtendConfig
from cute_kernels.attention.extend.policies import UnpackConfig
from cute_kernels.attention.extend.schedule import (
    ExtendProblem,
    choose,
    choose_key_rows,
    choose_unpacked,
    queries_to_unpack_for,
)
from cute_kernels.attention.features import Features
from cute_kernels.formats import scores as score_options
from cute_kernels.formats.kv import code_of, modules_of
from cute_kernels.runtime.spec import KernelSpec, check_config

SHIPPED_FORMATS = ("bf16", "int8_token_head", "e4m3_token_head", "e4m3_tensor", "int4_g1", "int4_g4")
CAUSAL_PAGES = Features(causal=True, paged=True)


@dataclass(frozen=True, eq=False)
class ExtendSpec(KernelSpec):
    """One extend attention kernel; the function takes :func:`.arguments.attention_arguments`, on torch's stream."""

    config: ExtendConfig
    family: ClassVar[str] = "extend"

    @property
    def symbol(self) -> str:
        return self.config.name

    @property
    def _formats(self) -> tuple[str, ...]:
        """Names of those that decide the kernel."""
        return self.config.k_format, self.config.v_format

    def policies(self) -> tuple[object, ...]:
        return *code_of("extend", *self._formats), *score_options.code_of(self.config.features)

    def modules(self) -> tuple[str, ...]:
        of_formats = modules_of(*self._formats)
        return tuple(dict.fromkeys((*of_formats, *score_options.modules_of(self.config.features))))

    def compile(self, arch: str) -> Any:
        return compile_extend(self.config, arch)


@dataclass(frozen=True, eq=False)
class UnpackSpec(KernelSpec):
    """What makes rows of 16 bits of a cache: the function takes :data:`.arguments.UNPACK`."""

    config: UnpackConfig
    family: ClassVar[str] = "extend"

    @property
    def symbol(self) -> str:
        return self.config.name

    def policies(self) -> tuple[object, ...]:
        return code_of("extend", self.config.k_format, self.config.v_format)

    def modules(self) -> tuple[str, ...]:
        return modules_of(self.config.k_format, self.config.v_format)

    def compile(self, arch: str) -> Any:
        return compile_unpack(self.config, arch)


@dataclass(frozen=True, eq=False)
class CombineSpec(KernelSpec):
    """What puts splits together: the function takes :data:`.arguments.COMBINE`."""

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
    many = [config for config in loading if queries_to_unpack_for(config, 1, 1, None) is not None]
    unpacked = [choose_unpacked(config) for config in many]
    few = [own for config in loading for own in choose_key_rows(config, mapped=True, tile_heads=2)]
    attention = dict.fromkeys((*loading, *few, *(config for _, config in unpacked)))
    unpacking = [UnpackSpec(config) for config, _ in unpacked]
    return [*map(ExtendSpec, attention), *unpacking, *map(CombineSpec, combines)]


def compile_extend(config: ExtendConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.attention.extend.kernel import ExtendKernel

    check_config(config)
    dtype = _element_type(config.q_dtype)
    total_q, q_heads, *blocks = (cute.sym_int() for _ in range(5))

    def cache(form, cache_type):
        if cache_type is None:
            return _fake_cache(blocks, cutlass.Uint8, form.row_elements(config.head_dim), 4)
        return _fake_cache(blocks, _element_type(cache_type), config.head_dim, 16)

    k_cache, v_cache = map(cache, config.formats, config.cache_types)
    tensors = {
        "q": _fake_dense(dtype, (total_q, q_heads, config.head_dim), apart=config.strided_q),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cu_seqlens": _fake_dense(cutlass.Int32, (cute.sym_int(),)),
        "seq_lens": _fake_dense(cutlass.Int32, (cute.sym_int(),)),
        "out": _fake_dense(dtype, (total_q, q_heads, config.head_dim)),
    }
    return attention_arguments(config.features).compile(ExtendKernel(config).launch, tensors, arch, *options)


def _element_type(name: str) -> Any:
    """Of tensors; codes come as bytes."""
    import cutlass

    return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": cutlass.Uint8}[name]


def _fake_dense(dtype: Any, shape: tuple[Any, ...], *, apart: bool = False) -> Any:
    """Without gaps; rows of 16 bits aligned to 16 bytes, integers to theirs. apart: but for the first dimension."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    align = 4 if dtype.width == 32 else 16
    if apart:
        strides = (cute.sym_int64(divisibility=align * 8 // dtype.width), shape[2], 1)
        return make_fake_tensor(dtype, shape, stride=strides, assumed_align=align)
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def _fake_cache(shape: Iterable[Any], dtype: Any, row: int, align: int) -> Any:
    """A cache of such a shape, whose rows are aligned and without gaps."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = [cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in range(3)]
    return make_fake_tensor(dtype, (*shape, row), stride=(*strides, 1), assumed_align=align)


def compile_unpack(config: UnpackConfig, arch: str, *options: str) -> Any:
    """As :func:`compile_extend`, for the kernel that makes rows of 16 bits of a cache."""
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.attention.extend.unpack import UnpackKernel

    check_config(config)
    dtype = _element_type(config.dtype)
    *blocks, requests, heads, room = (cute.sym_int() for _ in range(6))

    def cache(form):
        row, coded = form.row_elements(config.head_dim), form.is_coded
        return _fake_cache(blocks, cutlass.Uint8 if coded else dtype, row, 4 if coded else 16)

    k_cache, v_cache = map(cache, config.formats)
    tensors = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_rows": _fake_dense(dtype, (requests, heads, room, config.head_dim)),
        "v_rows": _fake_dense(dtype, (requests, heads, room, config.head_dim)),
        "cu_seqlens": _fake_dense(cutlass.Int32, (cute.sym_int(),)),
        "seq_lens": _fake_dense(cutlass.Int32, (cute.sym_int(),)),
    }
    return UNPACK.compile(UnpackKernel(config).launch, tensors, arch, *options)


def compile_combine(config: CombineConfig, arch: str, *options: str) -> Any:
    """As :func:`compile_extend`, for the kernel that puts splits together."""
    import cutlass
    import cutlass.cute as cute

    from cute_kernels.attention.extend.combine import CombineKernel

    check_config(config)
    out = _fake_dense(_element_type(config.q_dtype), (cute.sym_int(), cute.sym_int(), config.head_dim))
    tensors = {"out": out, "cu_seqlens": _fake_dense(cutlass.Int32, (cute.sym_int(),))}
    return COMBINE.compile(CombineKernel(config).launch, tensors, arch, *options)
