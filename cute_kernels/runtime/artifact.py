"""Compiles a spec into an artifact: an object file, and the launches that its host code contains."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.runtime import native
from cute_kernels.runtime.native import DSL_DISTRIBUTION, CompilerMissingError
from cute_kernels.runtime.spec import KernelSpec


class Launch(NamedTuple):
    """One kernel launch in a host function.

    `dynamic_smem_bytes` and `threads` (per CTA) are None if they are computed at run time.
    """

    kernel: str
    dynamic_smem_bytes: int | None
    threads: int | None


class Artifact(NamedTuple):
    """A compiled kernel: `object_code` is an ELF object that exports `__tvm_ffi_<symbol>` and embeds the CUBIN."""

    symbol: str
    object_code: bytes
    launches: tuple[Launch, ...]

    def launches_json(self) -> list[dict[str, Any]]:
        return [launch._asdict() for launch in self.launches]


def launches_from_json(values: list[dict[str, Any]]) -> tuple[Launch, ...]:
    return tuple(Launch(**value) for value in values)


def compile_artifact(spec: KernelSpec, arch: str) -> Artifact:
    """Compiles `spec` for `arch` in this process. Not thread-safe, because the DSL's compiler is not.

    Raises ValueError for an architecture that the kernel is not written for. Raises CompilerMissingError if the DSL is
    missing or has a version that these kernels do not support. Errors of the DSL pass through.
    """
    spec.check()
    spec.check_arch(arch)
    if native.dsl_version() is not None and native.compiler_version() is None:
        raise CompilerMissingError(f"{spec} is in no cache and no ahead-of-time bundle; {native.compiler_remedy()}")
    try:
        import cutlass  # noqa: F401
    except ImportError as error:
        raise CompilerMissingError(
            f"{spec} is in no cache and no ahead-of-time bundle, and compiling it needs {DSL_DISTRIBUTION}: {error}"
        ) from error
    compiled = spec.compile(arch)
    if not hasattr(compiled, "export_to_c"):
        raise TypeError(f"{type(spec).__qualname__}.compile must return what cute.compile returned, got {compiled!r}")
    with tempfile.TemporaryDirectory(prefix="cute_kernels_") as folder:
        path = Path(folder) / f"{spec.symbol}.o"
        compiled.export_to_c(str(path), function_name=spec.symbol)
        object_code = path.read_bytes()
    return Artifact(spec.symbol, object_code, launches_in(str(compiled.ir_module)))


# The launch configuration in the lowered host code: {grid[3], block[3], dynamic smem, stream, attributes, count}.
_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i(?:32|64)\)")
_FIELD = re.compile(rf"(%\w+) = llvm\.getelementptr (%\w+)\[0, (1, [012]|2)\] : .*{_CONFIG}")
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i(?:32|64), !llvm\.ptr")
_KERNEL = re.compile(r"(%\w+) = llvm\.mlir\.addressof @kernels?_(\w+) : !llvm\.ptr")
_CALL = re.compile(r"llvm\.call @_cudaLaunchKernelEx\(")


def launches_in(host_ir: str) -> tuple[Launch, ...]:
    """Returns the launches in a host function's LLVM-dialect IR.

    The DSL keeps no record of the size of a kernel's dynamic shared memory. So the size is read where the host code
    passes it to the driver. The code has one launch configuration for each launch, in the same order.
    """
    launches: list[Launch] = []
    constants: dict[str, int] = {}
    fields: dict[str, tuple[str, str]] = {}
    configs: dict[str, dict[str, int | None]] = {}
    kernel = ""
    for line in host_ir.splitlines():
        text = line.lstrip()
        if text.startswith("llvm.func"):
            constants, fields, configs = {}, {}, {}
        elif match := _CONSTANT.match(text):
            constants[match[1]] = int(match[2])
        elif match := _FIELD.match(text):
            fields[match[1]] = (match[2], match[3])
        elif (match := _STORE.match(text)) and match[2] in fields:
            config, field = fields[match[2]]
            configs.setdefault(config, {}).setdefault(field, constants.get(match[1]))
        elif match := _KERNEL.match(text):
            kernel = match[2]
        elif _CALL.search(text) and configs:
            values = configs.pop(next(iter(configs)))
            block = [values.get(f"1, {axis}") for axis in range(3)]
            launches.append(Launch(kernel, values.get("2"), _product(block)))
    return tuple(launches)


def _product(values: list[int | None]) -> int | None:
    result = 1
    for value in values:
        if value is None:
            return None
        result *= value
    return result
