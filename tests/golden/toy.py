"""A kernel in several versions, to try the comparison with: the same under other names, and small differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.runtime import KernelSpec, compile_options


@dataclass(frozen=True)
class ToyConfig:
    """version: name of a class of tests.golden.toy_kernel. name: the symbol."""

    version: str
    name: str


@dataclass(frozen=True, eq=False)
class ToySpec(KernelSpec):
    config: ToyConfig
    family: ClassVar[str] = "toy"

    @property
    def symbol(self) -> str:
        return self.config.name

    def compile(self, arch: str) -> Any:
        import cutlass
        from cutlass import cute

        from tests.golden import toy_kernel

        size = cute.sym_int(divisibility=4)
        x = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (size,), assumed_align=16)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        kernel = getattr(toy_kernel, self.config.version)()
        return cute.compile(kernel, x, stream, options=compile_options(arch))
