"""From a configuration to a compiled function; the only module of these kernels that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.runtime.spec import KernelSpec, compile_options

SHARED_MODULES = ("config", "decode", "epilogue", "work")  # of the room
KERNEL_MODULES = ("compile", "config", "epilogue", "kernel", "tiles")
NUM_ADDRESSES, NUM_INTEGERS = 7, 8  # of a launch, after x


@dataclass(frozen=True, eq=False)
class WgmmaSpec(KernelSpec):
    """One weight-only GEMM kernel for many rows.

    The function takes what :meth:`WgmmaKernel.__call__` describes: x as a torch tensor, then addresses and integers.
    It runs on torch's current stream.
    """

    config: WgmmaConfig
    family: ClassVar[str] = "linear"

    @property
    def symbol(self) -> str:  # type: ignore[override]
        return self.config.name

    def source_roots(self) -> tuple[Path, ...]:
        """The modules that say what the kernel is, not all of the room: the others change nothing that is compiled."""
        folder = Path(__file__).resolve().parent
        shared = tuple(folder.parent / f"{name}.py" for name in SHARED_MODULES)
        return shared + tuple(folder / f"{name}.py" for name in KERNEL_MODULES)

    def compile(self, arch: str) -> Any:
        return compile_wgmma(self.config, arch)


def compile_wgmma(config: WgmmaConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from cute_kernels.linear.wgmma.kernel import WgmmaKernel

    reason = config.can_implement()
    if reason is not None:
        raise ValueError(f"config: {reason} ({config})")
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[config.dtype]
    shape = (cute.sym_int(), cute.sym_int(divisibility=8))
    x = make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)
    numbers = [cutlass.Int64(0)] * NUM_ADDRESSES + [cutlass.Int32(1)] * NUM_INTEGERS
    return cute.compile(
        WgmmaKernel(config),
        x,
        *numbers,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch, *options),
    )
