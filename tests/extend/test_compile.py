"""Every kind of kernel compiles without a GPU, as what it was designed to be: no spills, products side by side."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cute_kernels.attention.problem import AttentionProblem

pytest.importorskip("cutlass")

from cute_kernels.attention.compile import CAUSAL_PAGES, AttentionSpec
from cute_kernels.attention.extend_policies import (
    GROUP_TOKENS,
    MMA_WARPS,
    MOST_COLUMNS,
    SM_REGISTERS,
    UNPACK_CTAS_PER_SM,
    UNPACK_WARPS,
    CachedKeys,
    ProducerPipeline,
    UnpackedKeys,
)
from cute_kernels.attention.extend_schedule import choose, choose_fp8, choose_newer, choose_unpacked, key_rows_of
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.scores.features import PLAIN, Features
from cute_kernels.runtime import default_cache
from cute_kernels.runtime.doctor import ToolMissingError, find_tool
from tests import golden
from tools.resources import cubins_in, resource_report

FEATURES = Features(causal=True, window=True, soft_cap=True, sinks=True, alibi=True, paged=True)
CONFIGS = {
    "bf16": choose(AttentionProblem.ragged(128, "bf16", "bf16", "bf16", 64, CAUSAL_PAGES)),
    "features": choose(AttentionProblem.ragged(128, "bf16", "bf16", "bf16", 16, FEATURES)),
    "int8": choose(AttentionProblem.ragged(128, "int8_token_head", "int8_token_head", "bf16", 64, CAUSAL_PAGES)),
    "int4": choose(AttentionProblem.ragged(128, "int4_g4", "int4_g4", "bf16", 64, CAUSAL_PAGES)),
    "contiguous": choose(AttentionProblem.ragged(64, "e4m3_tensor", "e4m3_tensor", "fp16", 0, PLAIN)),
}
CONFIGS["tree"] = choose(AttentionProblem.ragged(128, "bf16", "bf16", "bf16", 64, Features(paged=True), tree=True))
CONFIGS["head_dim 80"] = choose(AttentionProblem.ragged(80, "bf16", "bf16", "bf16", 64, CAUSAL_PAGES))
CONFIGS["K of 16 bits"] = choose(AttentionProblem.ragged(128, "bf16", "int8_token_head", "bf16", 64, CAUSAL_PAGES))
CONFIGS["V of 16 bits"] = choose(AttentionProblem.ragged(128, "int8_channel", "bf16", "bf16", 64, CAUSAL_PAGES))
CONFIGS["new tokens"] = choose_newer(CONFIGS["bf16"])
CONFIGS["unpacked, a scale a tile"] = choose_unpacked(CONFIGS["int8"])[1]
CONFIGS["unpacked"] = choose_unpacked(CONFIGS["int4"])[1]
UNPACKING = {name: choose_unpacked(CONFIGS[name])[0] for name in ("int8", "int4", "contiguous")}
for name, features in {"FP8 products": CAUSAL_PAGES, "FP8 products, features": FEATURES}.items():
    problem = AttentionProblem.ragged(128, "e4m3_tensor", "e4m3_tensor", "bf16", 64, features)
    UNPACKING[name], CONFIGS[name] = choose_fp8(choose(problem))
KEY_ROWS = {
    name: found
    for name in ("int8_token_head", "e4m3_tensor", "int4_g4")
    if (
        found := key_rows_of(
            choose(AttentionProblem.ragged(128, name, name, "bf16", 64, CAUSAL_PAGES)), MOST_COLUMNS, True, 2
        )
    )
}
COMPILED = golden.worth_compiling(CONFIGS, lambda name: AttentionSpec(CONFIGS[name]))
UNPACKED = golden.worth_compiling(UNPACKING, lambda name: AttentionSpec(UNPACKING[name]))
KEY_ROWS_COMPILED = golden.worth_compiling(KEY_ROWS, lambda name: AttentionSpec(KEY_ROWS[name]))


@pytest.fixture(scope="module")
def artifacts():
    """By name."""
    try:
        find_tool("nvdisasm")
    except ToolMissingError as error:
        pytest.skip(str(error))
    # In processes of their own: tracing leaves functions changed that other tests run as plain Python.
    compiled = default_cache().artifacts([AttentionSpec(CONFIGS[name]) for name in COMPILED], "sm_90a")
    return dict(zip(COMPILED, compiled, strict=True))


@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_to_what_it_was_designed_to_be(name, artifacts):
    config, artifact = CONFIGS[name], artifacts[name]
    (report,) = resource_report(artifact)
    # With every feature at once ptxas keeps a few words of the epilogue's in local memory.
    assert report.spill_store_bytes <= (20 if config.features == FEATURES else 0)
    assert report.threads in (None, config.num_threads)
    producing, consuming = config.registers
    shared_out = MMA_WARPS * consuming + config.pipeline.producer_warps * producing
    assert shared_out <= (MMA_WARPS + config.pipeline.producer_warps) * report.registers, (
        "no warp waits for registers for ever"
    )
    opcode, columns = ("QGMMA", 32) if config.fp8 else ("HGMMA", 16)
    steps = config.head_dim // columns, config.tile_tokens // columns
    assert report.opcodes[opcode] == 2 * sum(steps), "the first block's, the loop's and the last block's products"
    # Fences and waits of groups: one for each product would mean that ptxas puts them one after the other.
    assert report.opcodes["WARPGROUP"] <= 4 + 2 * 4 + 3


@pytest.mark.parametrize("name", [name for name in COMPILED if not CONFIGS[name].fp8])
def test_a_block_s_softmax_runs_while_the_values_of_the_block_before_are_multiplied(name, artifacts, tmp_path: Path):
    """In the loop: scores and values issued, a wait for scores, all powers of 2, then the wait for values."""
    config, code = CONFIGS[name], _machine_code(artifacts[name], tmp_path)
    first = max(i for i, line in enumerate(code) if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line)
    second = next(i for i in range(first, len(code)) if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in code[i])
    powers = sum("MUFU.EX2" in line for line in code[first:second])
    assert powers >= config.tile_tokens // 2


def _machine_code(artifact, folder: Path) -> list[str]:
    """Lines of a kernel's."""
    (image,) = cubins_in(artifact.object_code)
    (folder / "kernel.cubin").write_bytes(image)
    command = [find_tool("nvdisasm"), "-c", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("name", UNPACKED)
def test_unpacking_is_short_code_of_few_registers(name):
    """Four CTAs of eight warps an SM. What a warp spills is of a request, not of a row."""
    spec = AttentionSpec(UNPACKING[name])
    (artifact,) = default_cache().artifacts([spec], "sm_90a")
    (report,) = resource_report(artifact)
    assert report.threads == UNPACK_WARPS * WARP_THREADS
    assert report.registers <= SM_REGISTERS // (UNPACK_CTAS_PER_SM * report.threads) and report.spill_store_bytes <= 48
    assert report.num_instructions <= 1500, "it once was 7200, which the instruction cache does not hold"


def test_unpacking_asks_for_all_rows_before_it_waits_for_their_greatest_scale(tmp_path: Path):
    """Of K and of V: loads, the barrier behind which a tile's greatest scale is known, stores."""
    config = UNPACKING["int8"]
    (artifact,) = default_cache().artifacts([AttentionSpec(config)], "sm_90a")
    code = _machine_code(artifact, tmp_path)
    kinds = [kind for line in code for kind in ("LDG", "BAR.SYNC", "STG") if kind in line]
    parts = [part.split() for part in " ".join(kinds).split("BAR.SYNC")[1:]]
    assert len(parts) == 2
    for part in parts:
        first_load = part.index("LDG") if "LDG" in part else len(part)
        assert first_load >= config.warp_rows, "stores come first"


@pytest.mark.parametrize("name", KEY_ROWS_COMPILED)
def test_key_rows_keep_all_sums_in_registers_and_products_side_by_side(name):
    """The loop's scores and values, and the last block's values: a fence for two steps of keys, or one of values; waits
    for scores, for both, for the last values."""
    config = KEY_ROWS[name]
    assert len(KEY_ROWS) == 3
    (artifact,) = default_cache().artifacts([AttentionSpec(config)], "sm_90a")
    (report,) = resource_report(artifact)
    assert report.spill_store_bytes == report.stack_bytes == 0
    producing, consuming = config.registers
    shared_out = MMA_WARPS * consuming + config.pipeline.producer_warps * producing
    assert shared_out <= (MMA_WARPS + config.pipeline.producer_warps) * report.registers, (
        "no warp waits for registers for ever"
    )
    assert report.opcodes["HGMMA"] == config.head_dim // 16 + 2 * 2 * GROUP_TOKENS // 16
    assert report.opcodes["WARPGROUP"] <= 4 + 2 * 4 + 3


def test_what_a_configuration_says_is_what_it_is_told_apart_by():
    config = CONFIGS["bf16"]
    changed = [
        replace(config, pipeline=ProducerPipeline(producer_warps=8)),
        replace(config, keys=CachedKeys(16)),
        replace(config, keys=UnpackedKeys()),
        replace(config, keys=UnpackedKeys(fp8=True)),
        replace(config, merges=True),
        replace(config, features=FEATURES),
        replace(config, tile_rows=72),
        replace(config, tile_rows=72, keys=CachedKeys(64, mapped=True)),
        CONFIGS["new tokens"],
    ]
    assert len({config.name, *(other.name for other in changed)}) == len(changed) + 1
