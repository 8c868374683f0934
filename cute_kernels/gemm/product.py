"""`Product`, a compiled kernel with all launch arguments that do not change from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.activations import config_of, number_of
from cute_kernels.gemm.out_kinds import BF16, FP16, FP32
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.served import schedule_for
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream.schedule import StreamSchedule
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.launch_arguments import LaunchArguments, by_name

OUT_KINDS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
DENSE = ("codes", "scales", "zeros", "bias", "residual", "out", "norm", "scaled", "squares", "x_scales")
"""Names of the tensors whose addresses kernels of dense products take; a kernel takes some of them."""

Bind = Callable[[Mapping[str, Any]], Callable[..., Any]]
"""Makes a launcher from the numbers, by name, that its calls have in common. The launcher takes x and other
tensors, or None, by name."""


@dataclass(frozen=True)
class Product:
    """A product, dense or of experts, by any kernel. It holds everything that launches need, except a call's numbers
    and addresses.

    Attributes:
        schedule: the schedule that it was made from.
        device_index: index of the GPU.
        bind: makes the function that launches the product.
    """

    schedule: Any
    device_index: int
    bind: Bind

    def bound(self, n: int, activation: object, out_dtype: torch.dtype, **added: object) -> Callable[..., Any]:
        """Returns a function that launches the product on the current stream of the current device. The function is for
        all calls with this ``n``, activation, ``out_dtype`` and ``added``.

        The function takes x [m, k], on 16 bytes, with k a multiple of 8, and other tensors, or None, by name.
        activation: a name or an object. An activation that is not standard must be the problem's own.
        """
        return self.bind({"n": n, "activation": number_of(activation), "out_kind": OUT_KINDS[out_dtype], **added})


def of_kernel(
    function: Callable[..., Any],
    declared: LaunchArguments,
    sizes: Mapping[str, int],
    tensors: tuple[str, ...],
    device_index: int,
    num_words: int = 0,
) -> Bind:
    """Returns the `Bind` of a product of one launch.

    Args:
        function: the compiled kernel.
        declared: the kernel's launch arguments.
        sizes: values of the launch arguments that the schedule decides.
        tensors: names of the tensors that callers may pass. Those that the kernel does not declare are ignored, and so
            is ``rows``.
        num_words: number of fp32 words of workspace; 0: none.
    """
    places = by_name(*(name for name in tensors if name in declared.names))
    ignored = tuple(name for name in (*tensors, "rows") if name not in declared.names)

    def bind(numbers: Mapping[str, Any]) -> Callable[..., Any]:
        fixed, made = {**sizes, **numbers}, {}
        if num_words:
            made["workspace"] = partial(workspace, device_index, num_words)
        elif "workspace" in declared.names:
            fixed["workspace"] = 0
        return declared.bound(function, fixed, places, made=made, ignored=ignored)

    return bind


def workspace(device_index: int, num_words: int) -> int:
    """Returns the address of a workspace for a launch on the current stream."""
    return GPU.workspace(device_index, GPU.stream(device_index), num_words)


# -- dense products ----------------------------------------------------------------------------------------------------


def problem_of(
    m: int,
    n: int,
    k: int,
    form: WeightFormat,
    dtype: torch.dtype,
    device: int,
    batch_invariant: bool = False,
    activation: object = None,
) -> LinearProblem:
    """Returns the problem of a product of ``m`` rows on a CUDA device. activation: a name or an object."""
    k_pad, own = padded_shape((n, k), form.group_size)[1], config_of(activation)
    return LinearProblem(m, n, k, k_pad, form, DTYPES[dtype], GPU.num_sms(device), batch_invariant, own)


@per_gpu
@lru_cache(maxsize=4096)
def product_of(problem: LinearProblem, device: int) -> Product:
    """Returns the product of a problem on a CUDA device.

    Raises UnsupportedGPUError: the device is no Hopper.
    """
    arch_of(device)
    return make_product(schedule_for(problem), problem.m, device)


def make_product(schedule: StreamSchedule | TileSchedule, m: int, device_index: int) -> Product:
    """Makes a schedule's product of ``m`` rows; loads or compiles its kernel."""
    spec = GemmSpec(schedule.config)
    words = schedule.workspace_words if isinstance(schedule, TileSchedule) else schedule.workspace_words(m)
    function, declared = load(spec, arch_of(device_index)), spec.kernel.arguments
    return Product(schedule, device_index, of_kernel(function, declared, schedule.sizes, DENSE, device_index, words))
