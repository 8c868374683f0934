"""The smallest real kernel family: y = scale * x through shared memory, to try the runtime with.

It compiles in a second, and its resources are known: `smem_floats * 4` bytes of dynamic shared memory, no spills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.runtime import KernelSpec, compile_options

NUM_THREADS = 128


@dataclass(frozen=True)
class TinyConfig:
    scale: float = 2.0
    smem_floats: int = 256


@dataclass(frozen=True)
class TinySpec(KernelSpec):
    config: TinyConfig = TinyConfig()
    family: ClassVar[str] = "tiny"

    def compile(self, arch: str) -> Any:
        import cutlass
        from cutlass import cute

        from tests.runtime.tiny_kernel import scale_host

        size = cute.sym_int(divisibility=4)
        x = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=16)
        y = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=16)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        config = self.config
        return cute.compile(scale_host, x, y, config.scale, config.smem_floats, stream, options=compile_options(arch))


@dataclass(frozen=True)
class BrokenSpec(TinySpec):
    """A spec whose compilation fails."""

    family: ClassVar[str] = "broken"

    def compile(self, arch: str) -> Any:
        raise ArithmeticError(f"cannot compile for {arch}")


@dataclass(frozen=True)
class CrashingSpec(TinySpec):
    """A spec whose compilation takes the process with it, as a crash of the compiler would."""

    family: ClassVar[str] = "crashing"

    def compile(self, arch: str) -> Any:
        import os

        os._exit(7)


@dataclass(frozen=True)
class TellingSpec(TinySpec):
    """A spec whose compilation fails and says in which process."""

    family: ClassVar[str] = "telling"

    def compile(self, arch: str) -> Any:
        import os

        raise ArithmeticError(f"process {os.getpid()}")


def tiny_specs(count: int) -> list[TinySpec]:
    return [TinySpec(TinyConfig(scale=float(i + 1), smem_floats=128 * (i + 1))) for i in range(count)]
