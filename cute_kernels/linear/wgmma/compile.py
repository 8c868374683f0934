"""From a configuration to a compiled function; the only module of these kernels that starts the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cute_kernels.linear.wgmma.config import DigitBlocksConfig, DigitRowsConfig, WgmmaConfig
from cute_kernels.linear.wgmma.resident_config import ResidentConfig
from cute_kernels.runtime.spec import KernelSpec, check_config, compile_matrix_kernel

SHARED_MODULES = ("config", "decode", "epilogue", "work")  # of the room
KERNEL_MODULES = (
    "box_stores", "cluster_parts", "compile", "config", "copies", "digit_blocks", "digit_kernel", "digit_rows",
    "digits", "digits_ahead", "epilogue", "few_rows", "kernel", "memory", "reading", "synchronous", "tiles",
)  # fmt: skip
RESIDENT_MODULES = ("resident_config", "resident_early", "resident_kernel", "resident_rows", "resident_units")
DIGIT_MODULES = ("config", "copies", "digit_rows", "digits", "reading", "resident_config", "resident_rows", "tiles")
NUM_ADDRESSES, NUM_INTEGERS = 7, 8  # of a launch, after x
NUM_DIGIT_INTEGERS = NUM_INTEGERS + 1  # where x comes in digits
ROWS_COUNTS = (4, 3)  # addresses and integers of the launch that makes them,
BLOCKS_COUNTS = (1, 2)  # and of that which makes them in blocks


def digit_roots() -> tuple[Path, ...]:
    """The modules that say what products in digits are, which a CTA makes itself."""
    folder = Path(__file__).resolve().parent
    return tuple(folder / f"{name}.py" for name in DIGIT_MODULES)


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


@dataclass(frozen=True, eq=False)
class ResidentSpec(WgmmaSpec):
    """The same of a kernel that makes digits of x itself, and keeps them."""

    config: ResidentConfig

    def source_roots(self) -> tuple[Path, ...]:
        folder = Path(__file__).resolve().parent
        return super().source_roots() + tuple(folder / f"{name}.py" for name in RESIDENT_MODULES)

    def compile(self, arch: str) -> Any:
        return compile_resident(self.config, arch)


@dataclass(frozen=True, eq=False)
class DigitRowsSpec(KernelSpec):
    """The kernel that makes digits of rows of x: takes what `DigitRowsKernel.__call__` describes."""

    config: DigitRowsConfig
    family: ClassVar[str] = "linear"

    @property
    def symbol(self) -> str:  # type: ignore[override]
        return self.config.name

    def source_roots(self) -> tuple[Path, ...]:
        folder = Path(__file__).resolve().parent
        return tuple(folder / f"{name}.py" for name in ("compile", "config", "digit_rows"))

    def compile(self, arch: str) -> Any:
        return compile_digit_rows(self.config, arch)


@dataclass(frozen=True, eq=False)
class DigitBlocksSpec(DigitRowsSpec):
    """The same of digits in blocks: takes what `DigitBlocksKernel.__call__` describes."""

    config: DigitBlocksConfig

    def source_roots(self) -> tuple[Path, ...]:
        return *super().source_roots(), Path(__file__).resolve().with_name("digit_blocks.py")

    def compile(self, arch: str) -> Any:
        return compile_digit_blocks(self.config, arch)


def compile_digit_rows(config: DigitRowsConfig, arch: str, *options: str) -> Any:
    """As `compile_wgmma`."""
    from cute_kernels.linear.wgmma.digit_rows import DigitRowsKernel

    check_config(config)
    return compile_matrix_kernel(DigitRowsKernel(config), config.dtype, ROWS_COUNTS, arch, *options)


def compile_digit_blocks(config: DigitBlocksConfig, arch: str, *options: str) -> Any:
    """As `compile_wgmma`."""
    from cute_kernels.linear.wgmma.digit_blocks import DigitBlocksKernel

    check_config(config)
    return compile_matrix_kernel(DigitBlocksKernel(config), config.dtype, BLOCKS_COUNTS, arch, *options)


def compile_wgmma(config: WgmmaConfig, arch: str, *options: str) -> Any:
    """Compiles one configuration for ``arch`` ("sm_90a") with fake tensors; needs no GPU.

    Raises ValueError if the configuration cannot be implemented.
    """
    from cute_kernels.linear.wgmma.digit_kernel import DigitWgmmaKernel
    from cute_kernels.linear.wgmma.kernel import WgmmaKernel

    check_config(config)
    counts = (NUM_ADDRESSES, NUM_DIGIT_INTEGERS if config.digits else NUM_INTEGERS)
    kernel = (DigitWgmmaKernel if config.digits else WgmmaKernel)(config)
    return compile_matrix_kernel(kernel, config.dtype, counts, arch, *options)


def compile_resident(config: ResidentConfig, arch: str, *options: str) -> Any:
    """As `compile_wgmma`."""
    from cute_kernels.linear.wgmma.resident_early import EarlyKernel
    from cute_kernels.linear.wgmma.resident_kernel import ResidentKernel

    check_config(config)
    counts = (NUM_ADDRESSES, NUM_INTEGERS)
    kernel = (EarlyKernel if config.sends_early else ResidentKernel)(config)
    return compile_matrix_kernel(kernel, config.dtype, counts, arch, *options)
