"""Biases in the machine code of the append for decode: rows that meet them have one loop, as plain ones."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.config import AppendConfig, RowPrologue
from cute_kernels.runtime import KernelSpec, default_cache
from tests import golden
from tests.linear import machine_code

ARCH = "sm_90a"
PLAIN = RowPrologue("half", 128)
MET = {"biases": (True, False), "both": (True, True)}
FORMATS = ("bf16", "int4_g4")


def spec(kv_format: str, prologue: RowPrologue = PLAIN) -> KernelSpec:
    return AppendSpec(AppendConfig.alike(kv_format, "bf16", 128, prologue).for_decode())


def with_terms(case: tuple[str, str]) -> KernelSpec:
    return spec(case[0], RowPrologue("half", 128, *MET[case[1]]))


def opcodes(kernel: KernelSpec, folder) -> list[str]:
    (artifact,) = default_cache().artifacts([kernel], ARCH)
    return [opcode for _, opcode, _ in machine_code.instructions(artifact.object_code, folder)]


@pytest.mark.parametrize("case", golden.worth_compiling([(f, m) for f in FORMATS for m in MET], with_terms))
def test_rows_that_meet_terms_have_one_loop_as_plain_ones_have(case: tuple[str, str], tmp_path):
    plain, met = (opcodes(kernel, tmp_path) for kernel in (spec(case[0]), with_terms(case)))
    stores = [sum(opcode.startswith("STG") for opcode in code) for code in (plain, met)]
    assert stores[0] == stores[1]
    assert sum(opcode == "MUFU.RSQ" for opcode in met) == 2 * MET[case[1]][1]  # of q and of k
