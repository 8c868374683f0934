"""The kernels of dense products that ship."""

from __future__ import annotations

from cute_kernels.gemm import deferred_choice
from cute_kernels.gemm.inputs.config import ROOMS, InputRowsConfig
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream import schedule as few_rows
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as many_rows
from cute_kernels.runtime.spec import KernelSpec


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that bundles hold and CI compiles; others compile on demand. The kernels that prepare rows of x
    are in bf16, for up to 32768 inputs where their order changes. In fp16 there is one, for rows with gaps."""
    rooms = (few_rows, many_rows, invariant)
    products = dict.fromkeys(config for room in rooms for config in room.shipped_configs())
    norms = deferred_choice.shipped_configs()
    inputs = [InputRowsConfig("bf16", room, scaled) for room in (0, *ROOMS[:2]) for scaled in (False, True)]
    return [GemmSpec(config) for config in (*products, *norms, *inputs, InputRowsConfig("fp16", 0, False))]
