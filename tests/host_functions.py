"""Compiled functions that take what a kernel's take, check it natively as those do, and launch nothing: on a CPU.

For `tests.launchers.recording`: what the native checks refuse is refused there too.
"""

from __future__ import annotations

import functools
from typing import Any

from cutlass import AddressSpace, BFloat16, Float16, cute

from cute_kernels.gemm.arguments import INPUT_ROWS
from cute_kernels.norm.arguments import norm_arguments
from cute_kernels.runtime import compile_options
from cute_kernels.runtime.launch_arguments import LaunchArguments


@functools.cache
def input_rows_function(config: Any) -> Any:
    """Of what prepares rows of x for a weight-only linear layer."""
    return accepting(INPUT_ROWS, {"out": _matrix(config)})


@functools.cache
def norm_function(config: Any) -> Any:
    """Of a norm."""
    return accepting(norm_arguments(config), {"out": _matrix(config)})


@functools.cache
def product_function(config: Any) -> Any:
    """Of a weight-only linear layer, for few rows or for many."""
    return accepting(config.kernel().arguments, {"x": _matrix(config)})


def _matrix(config: Any) -> Any:
    dtype = BFloat16 if config.dtype == "bf16" else Float16
    shape = cute.sym_int(), cute.sym_int(divisibility=8)
    return cute.runtime.make_fake_compact_tensor(
        dtype, shape, stride_order=(1, 0), assumed_align=16, memspace=AddressSpace.generic
    )


def accepting(declared: LaunchArguments, tensors: dict[str, Any]) -> Any:
    """A function that takes what a kernel with these arguments takes: one for all that take the same."""
    key = declared, described(tensors)
    if key not in _compiled:
        entry = declared.entry(lambda given: None, with_stream=False)
        _compiled[key] = cute.compile(entry, *declared.fake(tensors), options=compile_options("sm_90a"))
    return _compiled[key]


_compiled: dict[Any, Any] = {}


def described(tensors: dict[str, Any]) -> tuple[Any, ...]:
    """All that is asked of tensors: dtypes, memory, alignment, shapes and strides, and which sizes are the same one."""
    numbers: dict[int, int] = {}

    def named(extent: Any) -> Any:
        return extent if isinstance(extent, int) else (str(extent), numbers.setdefault(id(extent), len(numbers)))

    return tuple(
        (name, *fake.__cache_key__[:-2], *(tuple(map(named, extents)) for extents in (fake.shape, fake.stride)))
        for name, fake in tensors.items()
    )


@functools.cache
def attention_function(config: Any) -> Any:
    from cute_kernels.attention.arguments import decode_arguments
    from cute_kernels.attention.compile import fake_tensors

    return accepting(
        decode_arguments(config.features, config.page_tokens > 0), fake_tensors(config, AddressSpace.generic)
    )


@functools.cache
def step_function(config: Any) -> Any:
    """Of a step in one launch."""
    from cute_kernels.kv_cache.step_compile import fake_tensors, step_arguments

    return accepting(step_arguments(config), fake_tensors(config, AddressSpace.generic))


@functools.cache
def append_function(config: Any) -> Any:
    from cute_kernels.kv_cache.arguments import append_arguments
    from cute_kernels.kv_cache.compile import fake_tensors

    return accepting(append_arguments(config.transform is not None), fake_tensors(config, AddressSpace.generic))
