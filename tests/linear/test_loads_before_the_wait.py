"""What depends on no launch is asked for before the wait for the launch before: in the machine code, where ptxas moves
loads of constant memory behind it."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from cute_kernels.gemm.inputs.config import ROOMS
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.norm.compile import NormSpec
from cute_kernels.norm.config import BOTH, NormConfig, launch_shape
from cute_kernels.runtime import KernelSpec, default_cache
from tests.linear import machine_code

ARCH = "sm_90a"
WAIT = "ACQBULK"


def opcodes(spec: KernelSpec, folder) -> list[str]:
    (artifact,) = default_cache().artifacts([spec], ARCH)
    return [opcode for _, opcode, _ in machine_code.instructions(artifact.object_code, folder)]


def loads(code: list[str]) -> int:
    return sum(opcode.startswith("LDG.E") for opcode in code)


def test_what_a_norm_does_to_a_layers_inputs_is(tmp_path):
    """The norm's weight, an order of eight inputs, their factors."""
    code = opcodes(NormSpec(NormConfig("rms", "bf16", *launch_shape(4096), inputs=BOTH)), tmp_path)
    assert loads(code[: code.index(WAIT)]) == 1 + 2 + 1


@pytest.mark.parametrize(("room", "scaled", "count"), [(ROOMS[0], False, 2), (0, True, 1)])
def test_the_order_and_the_factors_of_prepared_rows_are(room: int, scaled: bool, count: int, tmp_path):
    code = opcodes(GemmSpec(RowsConfig("bf16", makes=INPUTS, room=room, scaled=scaled)), tmp_path)
    assert loads(code[: code.index(WAIT)]) == count
