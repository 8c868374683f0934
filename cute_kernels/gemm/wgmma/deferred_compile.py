"""From a configuration to a compiled function, of products around a deferred norm.

They take what dense products of tiles take (:mod:`cute_kernels.gemm.arguments`), and

    norm, scaled, squares  `GIVES`: weights bf16 [n], n a multiple of 256, on 16 bytes; out bf16 [m, n]; out fp32
                           [m, n / 64]. offset: fp32, added to weights
    squares                `TAKES`: fp32 [m, parts], on 16 bytes; parts a multiple of 4. inverse_k: 1 / k. eps: fp32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.gemm.arguments import TILES, compile_kernel
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES, DeferredNormConfig
from cute_kernels.runtime.launch_arguments import arguments, joined
from cute_kernels.runtime.spec import KernelSpec

ARGUMENTS = {
    GIVES: joined(TILES.arguments, arguments("address", "norm", "scaled", "squares"), arguments("float32", "offset")),
    TAKES: joined(
        TILES.arguments,
        arguments("address", "squares"),
        arguments("int32", "parts"),
        arguments("float32", "inverse_k", "eps"),
    ),
}
"""By the kind of a configuration."""


@dataclass(frozen=True, eq=False)
class DeferredNormSpec(KernelSpec):
    """One weight-only GEMM kernel around a deferred norm: takes `ARGUMENTS`, on torch's current stream."""

    config: DeferredNormConfig
    family: ClassVar[str] = "linear"

    def compile(self, arch: str) -> Any:
        return compile_deferred(self.config, arch)


def compile_deferred(config: DeferredNormConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.gemm.wgmma.deferred_kernel import deferred_kernel

    return compile_kernel(deferred_kernel, config, ARGUMENTS[config.kind], arch, *options)
