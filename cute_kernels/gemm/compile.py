"""The kernels of dense products that ship."""

from __future__ import annotations

from itertools import product

from cute_kernels.gemm import deferred_choice
from cute_kernels.gemm.inputs.config import ROOMS
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream import schedule as few_rows
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as many_rows
from cute_kernels.runtime.spec import KernelSpec


def shipped_specs() -> list[KernelSpec]:
    """Returns the specs that bundles hold and CI compiles; other kernels compile on demand.

    Some of the kernels prepare rows of x. In bf16, they also ship with a permutation, for up to 32768 inputs. In fp16,
    only the kernel that closes gaps between rows ships.
    """
    rooms = (few_rows, many_rows, invariant)
    products = dict.fromkeys(config for room in rooms for config in room.shipped_configs())
    norms = deferred_choice.shipped_configs()
    forms = [*product(("bf16",), (0, *ROOMS[:2]), (False, True)), ("fp16", 0, False)]
    inputs = [RowsConfig(dtype, makes=INPUTS, room=room, scaled=scaled) for dtype, room, scaled in forms]
    return [GemmSpec(config) for config in (*products, *norms, *inputs)]
