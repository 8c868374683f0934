"""Compiled functions that take what a kernel's take, check it natively as those do, and launch nothing: on a CPU.

For `tests.launchers.recording`: what the native checks refuse is refused there too.
"""

from __future__ import annotations

import functools
from typing import Any

from cutlass import AddressSpace, BFloat16, Float16, Int32, Int64, cute

from cute_kernels.runtime import compile_options
from cute_kernels.runtime.launch_arguments import LaunchArguments


@cute.jit
def product(
    x: cute.Tensor, codes: Int64, scales: Int64, zeros: Int64, bias: Int64, residual: Int64, out: Int64,
    workspace: Int64, n: Int32, num_tiles: Int32, units: Int32, slices: Int32, groups: Int32, parts: Int32,
    activation: Int32, out_kind: Int32,
):  # fmt: skip
    pass


@cute.jit
def factored_product(
    x: cute.Tensor, codes: Int64, scales: Int64, zeros: Int64, bias: Int64, residual: Int64, out: Int64,
    workspace: Int64, factors: Int64, n: Int32, num_tiles: Int32, units: Int32, slices: Int32, groups: Int32,
    parts: Int32, activation: Int32, out_kind: Int32, eps: Int32, offset: Int32,
):  # fmt: skip
    pass


@cute.jit
def input_rows(out: cute.Tensor, x: Int64, order: Int64, factors: Int64, stride: Int64, parts: Int32):
    pass


@functools.cache
def input_rows_function(config: Any) -> Any:
    """Of what prepares rows of x for a weight-only linear layer."""
    dtype = BFloat16 if config.dtype == "bf16" else Float16
    shape = cute.sym_int(), cute.sym_int(divisibility=8)
    out = cute.runtime.make_fake_compact_tensor(
        dtype, shape, stride_order=(1, 0), assumed_align=16, memspace=AddressSpace.generic
    )
    return cute.compile(input_rows, out, *[Int64(0)] * 4, Int32(0), options=compile_options("sm_90a"))


@functools.cache
def product_function(config: Any) -> Any:
    """Of a weight-only linear layer, for few rows or for many."""
    dtype = BFloat16 if config.dtype == "bf16" else Float16
    shape = cute.sym_int(), cute.sym_int(divisibility=8)
    x = cute.runtime.make_fake_compact_tensor(
        dtype, shape, stride_order=(1, 0), assumed_align=16, memspace=AddressSpace.generic
    )
    factored = bool(getattr(getattr(config, "mainloop", None), "factors", ""))
    arguments = (x, *[Int64(0)] * (7 + factored), *[Int32(0)] * (8 + 2 * factored))
    return cute.compile(factored_product if factored else product, *arguments, options=compile_options("sm_90a"))


def accepting(declared: LaunchArguments, tensors: dict[str, Any]) -> Any:
    """A function that takes what a kernel with these arguments takes."""
    entry = declared.entry(lambda given: None, with_stream=False)
    return cute.compile(entry, *declared.fake(tensors), options=compile_options("sm_90a"))


@functools.cache
def attention_function(config: Any) -> Any:
    from cute_kernels.attention.arguments import arguments_of
    from cute_kernels.attention.compile import fake_tensors

    return accepting(arguments_of(config.features, config.page_tokens > 0), fake_tensors(config, AddressSpace.generic))


@functools.cache
def fill_function(config: Any) -> Any:
    """Of the kernel that fills blocks of keys."""
    from cute_kernels.kv_cache.arguments import FILL
    from cute_kernels.kv_cache.compile import fake_fill_tensors

    return accepting(FILL, fake_fill_tensors(config, AddressSpace.generic))


@functools.cache
def append_function(config: Any) -> Any:
    from cute_kernels.kv_cache.arguments import append_arguments
    from cute_kernels.kv_cache.compile import fake_tensors

    return accepting(append_arguments(config.transform is not None), fake_tensors(config, AddressSpace.generic))
