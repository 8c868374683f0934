"""Compiles configurations into functions; no other module of mla.cache starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.mla.cache.arguments import WRITE
from cute_kernels.mla.cache.config import WriteConfig
from cute_kernels.runtime.spec import KernelSpec, check_config
from layouts.kv.mla import ROPE_DIM


@dataclass(frozen=True, eq=False)
class WriteSpec(KernelSpec):
    """The spec of a kernel that writes MLA tokens; its function takes :data:`.arguments.WRITE`."""

    family: ClassVar[str] = "mla_cache"
    config: WriteConfig

    def compile(self, arch: str) -> Any:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_tensor

        from cute_kernels.mla.cache.kernel import WriteKernel

        config = self.config
        check_config(config)
        kernel = WriteKernel(config)
        dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}[config.dtype]
        num_tokens = cute.sym_int()

        def rows(columns: int, unit: int) -> Any:
            stride = (cute.sym_int64(divisibility=unit // (dtype.width // 8)), 1)
            return make_fake_tensor(dtype, (num_tokens, columns), stride=stride, assumed_align=unit)

        tensors = {
            "latent": rows(config.latent_dim, kernel.latent.piece.unit),
            "k_rope": rows(ROPE_DIM, kernel.rope.piece.unit),
        }
        return WRITE.compile(kernel.launch, tensors, arch)


def shipped_specs() -> list[KernelSpec]:
    """Lists the kernels that bundles contain and CI compiles: append of bf16 tokens, with DeepSeek's RoPE or rotated
    already."""
    return [
        WriteSpec(WriteConfig(kv_format, head_dim, "bf16", rope))
        for kv_format, head_dim in (("mla_fp8", 576), ("mla_model1", 512), ("mla_bf16", 576))
        for rope in ("none", "interleaved")
    ]
