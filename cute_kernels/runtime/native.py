"""Links and loads exported kernels as native code, with the DSL's runtime library and without its compiler.

A kernel exported by CuTe DSL calls a small runtime library (launch, library loading, errors). Loading that library and
the kernel takes milliseconds; importing the DSL itself brings in a 190 MB compiler. So nothing here imports the DSL,
except `open_object` on a machine without any linker.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.runtime.elf import dynamic_symbols

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
RUNTIME_VARIABLE = "CUTE_DSL_RUNTIME"
DSL_DISTRIBUTION = "nvidia-cutlass-dsl"
COMPILER_VERSION = "4.8.1"
"""The version of the DSL that compiles these kernels. Registers and spills of the same source differ between
releases."""
COMPILER_VERSIONS = (COMPILER_VERSION, "4.8.0")
"""The DSL's versions that compile these kernels to the same machine code; vLLM 0.32 and 0.33 pin the second. The CUBINs
of 23 kernels, one of each kind, were equal byte by byte."""

# Tried in this order; a compiler driver is asked for nothing but its linker.
LINKERS = (
    ("cc", ("-shared", "-nostdlib")),
    ("gcc", ("-shared", "-nostdlib")),
    ("clang", ("-shared", "-nostdlib")),
    ("ld", ("-shared",)),
    ("ld.lld", ("-shared",)),
)

C_COMPILERS = ("cc", "gcc", "clang")

# Marks of the x86-64 microarchitecture levels in /proc/cpuinfo (System V psABI), highest first.
_X86_LEVELS = (
    (4, {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    (3, {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    (2, {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)


class RuntimeLibraryError(RuntimeError):
    """The CuTe DSL runtime library is missing or does not load."""


class CompilerMissingError(RuntimeError):
    """A kernel has to be compiled (or an object loaded without a linker) and the DSL is not installed."""


class LinkerMissingError(RuntimeError):
    """A shared library has to be linked, and no linker was found."""


def _dsl_version() -> str | None:
    try:
        return importlib.metadata.version(DSL_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_version() -> str | None:
    """Returns the compiler's version; None if no installed compiler can compile these kernels.

    Other packages install other versions of the DSL, whose runtime libraries run these kernels but whose compilers do
    not compile them.
    """
    version = dsl_version()
    return version if version in COMPILER_VERSIONS else None


def compiler_remedy() -> str:
    """Returns advice on how to get a compiler, for errors of kernels that cannot be compiled."""
    version = dsl_version()
    if version is None:
        return f"the compiler is missing: pip install '{DSL_DISTRIBUTION}[cu13]=={COMPILER_VERSION}'"
    return (
        f"installed is {DSL_DISTRIBUTION} {version}, which these kernels are not compiled with: build a bundle with "
        f"{COMPILER_VERSION} in an environment of its own (python -m cute_kernels aot build)"
    )


@functools.cache
def tvm_ffi_version() -> str:
    """Returns the version of the apache-tvm-ffi that this process would import."""
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        import tvm_ffi

        return str(tvm_ffi.__version__)


@functools.cache
def _driver_version() -> tuple[int, int] | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


class Toolchain(NamedTuple):
    """The tools with which this machine compiles, links and runs kernels: functions that return versions, and commands
    to try.
    """

    dsl_version: Callable[[], str | None] = _dsl_version
    driver_version: Callable[[], tuple[int, int] | None] = _driver_version
    linkers: Sequence[tuple[str, tuple[str, ...]]] = LINKERS
    c_compilers: Sequence[str] = C_COMPILERS


_toolchain = Toolchain()


@contextmanager
def having(**others: Any) -> Iterator[None]:
    """Replaces the machine's tools within this block, for example to behave as a machine without a linker. others:
    fields of `Toolchain`."""
    global _toolchain
    before, _toolchain = _toolchain, _toolchain._replace(**others)
    try:
        yield
    finally:
        _toolchain = before


def dsl_version() -> str | None:
    """Returns the version of the installed nvidia-cutlass-dsl; None if it is not installed, or only its runtime library
    is."""
    return _toolchain.dsl_version()


def driver_version() -> tuple[int, int] | None:
    """Returns the newest CUDA version that the installed driver supports, as (major, minor); None without a driver."""
    return _toolchain.driver_version()


def linker_names() -> str:
    """Returns the names of the linkers that are tried, for messages."""
    return ", ".join(name for name, _ in _toolchain.linkers)


def runtime_library() -> Path:
    """Returns the path of the DSL's runtime library, without importing the DSL.

    `CUTE_DSL_RUNTIME` may name the file. Otherwise the library is part of the installed DSL, which has one library per
    CUDA major version. The newest library that the driver supports is used; without a driver, the newest of all. The
    DSL chooses its compiler by the same rule, so that objects and library agree.
    """
    named = os.environ.get(RUNTIME_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise RuntimeLibraryError(f"{RUNTIME_VARIABLE}={named} is no file")
        return Path(named)
    return _installed_runtime_library()


@functools.cache
def _installed_runtime_library() -> Path:
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = {
        int(library.parent.parent.name[2:]): library
        for folder in folders
        for library in folder.glob(f"cu[0-9]*/lib/{RUNTIME_LIBRARY}")
    }
    driver = driver_version()
    usable = [major for major in found if driver is None or major <= driver[0]]
    if usable:
        return found[max(usable)]
    if found:
        have = ", ".join(f"CUDA {major}" for major in sorted(found))
        raise RuntimeLibraryError(
            f"{RUNTIME_LIBRARY} is installed for {have}, the driver takes CUDA {'.'.join(map(str, driver or ()))}"
        )
    raise RuntimeLibraryError(
        f"{RUNTIME_LIBRARY} was not found: install {DSL_DISTRIBUTION}, or name the file in {RUNTIME_VARIABLE}"
    )


def missing_symbols(wanted: Iterable[str]) -> list[str]:
    """Returns the ``wanted`` symbols that neither the runtime library nor apache-tvm-ffi nor the process has.

    Raises RuntimeLibraryError if the runtime library is missing.
    """
    from tvm_ffi.libinfo import find_libtvm_ffi

    there = dynamic_symbols(runtime_library()).exported | dynamic_symbols(Path(find_libtvm_ffi())).exported
    process = ctypes.CDLL(None)
    return sorted(name for name in set(wanted) - there if not hasattr(process, name))


def runtime_flavor() -> str:
    """Returns the DSL's toolkit that this machine uses, such as "cu13"; "custom" if `CUTE_DSL_RUNTIME` names a library,
    "none" without one."""
    if os.environ.get(RUNTIME_VARIABLE):
        return "custom"
    try:
        return runtime_library().parent.parent.name
    except RuntimeLibraryError:
        return "none"


def load_runtime() -> Path:
    """Makes the runtime library's symbols visible to kernels that are loaded later. Returns the library's path.

    Raises RuntimeLibraryError if it is missing or does not load.
    """
    path = runtime_library()
    _load_runtime(path)
    return path


@functools.cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    # RTLD_GLOBAL: kernels are linked without naming the library and take its symbols from the process.
    try:
        return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeLibraryError(f"{path} does not load: {error}") from error


@functools.cache
def host_isa() -> str:
    """Returns the host's instruction set, such as "x86_64-v4"; the machine's name if it is no x86_64.

    The host code of an exported kernel is compiled for the CPU that exports it, with AVX-512 if the CPU has AVX-512. So
    an object may not run on an older CPU: the instruction set is part of cache keys, and bundles check it.
    """
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    try:
        with open("/proc/cpuinfo") as lines:  # the first core's: Linux takes time for each one
            flags = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    except OSError:
        return f"{machine}-v1"
    level = 1
    for candidate, marks in reversed(_X86_LEVELS):
        if not marks <= flags:
            break
        level = candidate
    return f"{machine}-v{level}"


def isa_runs(built_for: str, host: str) -> bool:
    """Returns whether host code that was built for one instruction set runs on a host with another. Both are named as
    `host_isa` names them."""
    machine, _, level = built_for.partition("-v")
    host_machine, _, host_level = host.partition("-v")
    return machine == host_machine and int(level or 0) <= int(host_level or 0)


def find_linker() -> list[str] | None:
    """Returns the command that links objects into a shared library, without `-o` and inputs; None without a linker."""
    found = ((shutil.which(name), options) for name, options in _toolchain.linkers)
    return next(([path, *options] for path, options in found if path), None)


def compile_c(source: Path, output: Path) -> bool:
    """Compiles a C file that needs no library into an object; returns False without a C compiler.

    Raises RuntimeError with the compiler's message if it fails.
    """
    compiler = next((path for name in _toolchain.c_compilers if (path := shutil.which(name))), None)
    if compiler is None:
        return False
    options = ["-c", "-O2", "-fPIC", "-ffreestanding", "-fno-stack-protector"]
    done = subprocess.run(
        [compiler, *options, "-o", str(output), str(source)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{compiler} failed to compile {source.name}: {done.stderr.strip()[-2000:]}")
    return True


def link(objects: list[Path], output: Path) -> None:
    """Links exported objects into one shared library.

    Raises LinkerMissingError if there is no linker. If the linker fails, raises RuntimeError with the linker's message.
    """
    command = find_linker()
    if command is None:
        raise LinkerMissingError(f"no linker found (tried {linker_names()})")
    # A response file: hundreds of kernels exceed the length of a command line.
    with tempfile.NamedTemporaryFile("w", suffix=".rsp") as response:
        response.write("\n".join(f'"{path}"' for path in objects))
        response.flush()
        done = subprocess.run(
            [*command, "-o", str(output), f"@{response.name}"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed to link {output.name}: {done.stderr.strip()[-2000:]}")


def open_library(path: Path) -> Callable[[str], Any]:
    """Loads a shared library of kernels; returns a lookup from symbol to its raw TVM-FFI function.

    Raises RuntimeError or OSError if it does not load.
    """
    import tvm_ffi  # here, as it loads a library that CPU tensors have no use for

    load_runtime()
    status = path.stat()
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns)
    if _opened.setdefault(path, identity) == identity:
        module = tvm_ffi.load_module(str(path))
    else:
        # The dynamic linker goes by name: it would answer with the file that used to be there.
        with tempfile.TemporaryDirectory(prefix="cute_kernels_") as folder:
            module = tvm_ffi.load_module(shutil.copy(path, folder))
    return lambda symbol: module[symbol]


_opened: dict[Path, tuple[int, int, int]] = {}


def open_object(path: Path) -> Callable[[str], Any]:
    """Loads one unlinked object by the DSL's own loader, on machines without a linker.

    Imports the DSL (0.4 s), which is why linked libraries are preferred. Raises CompilerMissingError without it.
    """
    try:
        from cutlass import cute
    except ImportError as error:
        raise CompilerMissingError(
            f"loading {path.name} needs a linker (cc or ld) or {DSL_DISTRIBUTION}: {error}"
        ) from error
    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return lambda symbol: getattr(module, symbol)
