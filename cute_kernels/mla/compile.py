"""Compiles configurations into functions; no other module of MLA decode starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.mla.arguments import COMBINE, arguments_of
from cute_kernels.mla.config import (
    COMBINE_SLOTS,
    PARTIALS,
    SCALED_PARTIALS,
    SHIPPED,
    CombineConfig,
    MlaConfig,
    served_config,
)
from cute_kernels.mla.few_heads.config import FewHeadsConfig, shipped_few_heads
from cute_kernels.runtime.spec import KernelSpec, check_config


class _MlaFamily(KernelSpec):
    """The base of `MlaSpec` and `CombineSpec`."""

    family: ClassVar[str] = "mla"


@dataclass(frozen=True, eq=False)
class MlaSpec(_MlaFamily):
    """The spec of decode. Its function takes :data:`.arguments.SPARSE` or :data:`.arguments.PAGED`, on torch's current
    stream."""

    config: MlaConfig | FewHeadsConfig

    def compile(self, arch: str) -> Any:
        from cute_kernels.mla.entry import DecodeEntry
        from cute_kernels.mla.few_heads.kernel import FewHeadsKernel
        from cute_kernels.mla.kernel import MlaKernel

        config = self.config
        check_config(config)
        kernel = FewHeadsKernel(config) if isinstance(config, FewHeadsConfig) else MlaKernel(config)
        tensors = {"q": _fake_rows(config.head_dim, config.layout.dtype)}
        return arguments_of(config.tokens).compile(DecodeEntry(kernel).launch, tensors, arch)


@dataclass(frozen=True, eq=False)
class CombineSpec(_MlaFamily):
    """The spec of the kernel that adds up parts. Its function takes :data:`.arguments.COMBINE`, on torch's current
    stream."""

    config: CombineConfig

    def compile(self, arch: str) -> Any:
        from cute_kernels.mla.combine.second_launch import CombineKernel

        tensors = {"out": _fake_rows(512, self.config.dtype)}
        return COMBINE.compile(CombineKernel(self.config).launch, tensors, arch)


def shipped_specs() -> list[KernelSpec]:
    """Lists the kernels that bundles contain and CI compiles."""
    configs = [*(served_config(*which) for which in SHIPPED), *shipped_few_heads()]
    return [*map(MlaSpec, configs), *combine_specs("bf16"), *combine_specs("fp16")]


def combine_specs(dtype: str) -> list[CombineSpec]:
    """Lists the kernels that may add up the parts of launches with results in ``dtype``, "bf16" or "fp16"."""
    forms = PARTIALS if dtype == FewHeadsConfig.layout.dtype else (SCALED_PARTIALS,)
    return [CombineSpec(CombineConfig(dtype, slots, form)) for form in forms for slots in COMBINE_SLOTS]


def _fake_rows(columns: int, dtype: str) -> Any:
    """Makes a contiguous stand-in [batch, q_len, num_heads, columns] for the compiler. dtype: "bf16" or "fp16"."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from cute_kernels.mla.elements import of_name

    shape = (*(cute.sym_int() for _ in range(3)), columns)
    return make_fake_compact_tensor(of_name(dtype).type, shape, stride_order=(3, 2, 1, 0), assumed_align=16)
