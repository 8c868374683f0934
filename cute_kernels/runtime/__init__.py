"""The runtime of all kernels: compiled functions by spec, caches, ahead-of-time bundles, reports.

load(spec, arch)          the callable of one kernel: memory, bundle, disk, or compiled now
load_many(specs, arch)    many, compiled in parallel processes
load_bundle(directory)    kernels built elsewhere, without the compiler
arch_of(device_index)     the architecture that kernels for a GPU are compiled for
"""

from cute_kernels.runtime.aot import Bundle, BundleError
from cute_kernels.runtime.cache import KernelCache, Progress, default_cache, load, load_bundle, load_many
from cute_kernels.runtime.device import SUPPORTED_ARCHS, UnsupportedGPUError, arch_of
from cute_kernels.runtime.launch_arguments import compile_options
from cute_kernels.runtime.native import CompilerMissingError, LinkerMissingError, RuntimeLibraryError
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.workers import CompileError

__all__ = [
    "SUPPORTED_ARCHS",
    "Bundle",
    "BundleError",
    "CompileError",
    "CompilerMissingError",
    "KernelCache",
    "KernelSpec",
    "LinkerMissingError",
    "Progress",
    "RuntimeLibraryError",
    "UnsupportedGPUError",
    "arch_of",
    "compile_options",
    "default_cache",
    "load",
    "load_bundle",
    "load_many",
]
