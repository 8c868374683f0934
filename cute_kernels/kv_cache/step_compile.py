"""Compiles kernels that append and attend in one launch, and lists their launch arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cute_kernels.attention import compile as attention_compile
from cute_kernels.attention.arguments import decode_arguments
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.kv_cache.arguments import CONSTANTS, TERMS
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.step_config import StepConfig
from cute_kernels.runtime.fake_tensors import element_type, strided
from cute_kernels.runtime.launch_arguments import LaunchArguments, arguments, joined
from cute_kernels.runtime.spec import KernelSpec, check_config

if TYPE_CHECKING:
    import cutlass.cute as cute

NEW_ROWS = (
    *arguments("tensor", "k", "v"),
    *arguments("address", "phase_steps"),
    *arguments("float32", "rope_factor"),
)
"""The arguments in addition to those of attention. k, v: [batch, num_kv_heads, head_dim] of the newest tokens, with any
stride of requests. phase_steps, rope_factor, and the constants of a transform, biases and norms: as in an append.
Attention's q is the q before RoPE."""
POSITIONS = (*arguments("address", "position_ids"), *arguments("int64", "position_bytes"))
"""Arguments for given positions: the address of int32 or int64 [batch], and the bytes of an element."""


def step_arguments(config: StepConfig) -> LaunchArguments:
    """Returns the arguments of a step in one launch."""
    attention = config.attention
    of_attention = decode_arguments(attention.features, attention.page_tokens > 0).arguments
    of_transform = () if config.append.transform is None else arguments("address", *CONSTANTS)
    of_terms = (*arguments("address", *TERMS), *arguments("float32", "norm_eps")) if config.has_terms else ()
    return joined(of_attention, NEW_ROWS, of_transform, of_terms, POSITIONS if config.positions else ())


@dataclass(frozen=True, eq=False)
class StepSpec(KernelSpec):
    """One kernel of a step in one launch; the compiled function takes :func:`step_arguments`."""

    config: StepConfig
    family: ClassVar[str] = "kv_cache"

    @property
    def of_attention(self) -> AttentionSpec:
        return AttentionSpec(self.config.attention)

    def policies(self) -> tuple[object, ...]:
        return *self.of_attention.policies(), *AppendSpec(self.config.append).policies()

    def modules(self) -> tuple[str, ...]:
        return self.of_attention.modules()

    def compile(self, arch: str) -> Any:
        return compile_step(self.config, arch)


def compile_step(config: StepConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass

    from cute_kernels.attention.decode_kernel import DecodeKernel
    from cute_kernels.kv_cache.step_rows import NewRows

    check_config(config)
    kernel = DecodeKernel(config.attention, NewRows(config.attention, config.append, config.positions))
    return step_arguments(config).compile(
        kernel.launch, fake_tensors(config, cutlass.AddressSpace.gmem), arch, *options
    )


def fake_tensors(config: StepConfig, memory: cute.AddressSpace) -> dict[str, Any]:
    """Returns fake tensors for a launch, by name."""
    import cutlass.cute as cute

    from cute_kernels.device.rows import Elements

    append = config.append
    batch, heads = cute.sym_int(), cute.sym_int()

    def rows(head_dim: int):
        unit = Elements(append.dtype, head_dim, append.lanes, append.runs).piece.unit
        return strided(element_type(append.dtype), (batch, heads, head_dim), (unit,), unit, memory)

    new = {"k": rows(append.k.head_dim), "v": rows(append.v.head_dim)}
    return attention_compile.fake_tensors(config.attention, memory) | new
