"""What bundles do not hold compiles on demand, without spills: short k blocks, other shapes of CTAs, early launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_kernels.formats.weights import FP8_BLOCK, NVFP4, integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream.config import StreamConfig, StreamStore
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma, ResidentLimbs, ScaledSums
from cute_kernels.gemm.wgmma.results import (
    Dsmem,
    RowCuts,
    RowExchange,
    StagedStore,
    WorkspaceSplitK,
)
from cute_kernels.gemm.wgmma.schedule import (
    BETWEEN_SHAPES,
    DSMEM_FORMS,
    candidate_configs,
    dsmem_configs,
    wide_configs,
)
from cute_kernels.runtime import KernelSpec, default_cache, native
from cute_kernels.runtime.artifact import Artifact
from tests import golden
from tests.linear import machine_code

ARCH = "sm_90a"

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")

CONFIGS = [
    StreamConfig(integers(4, 32, True), "bf16", block_k=64),
    StreamConfig(integers(4, 64), "fp16", block_k=64, n_tiles=2, chunk_k_blocks=4),
    StreamConfig(integers(4, 0, True), "bf16", n_tiles=2, chunk_k_blocks=2),
    StreamConfig(integers(4), "bf16", k_warps=4),
    StreamConfig(integers(4), "bf16", k_warps=1, store=StreamStore(1)),
    StreamConfig(integers(4, 256, True), "bf16", block_k=256, chunk_k_blocks=2),
    StreamConfig(integers(8, 128, True), "bf16", k_warps=3, chunk_k_blocks=3, num_stages=5),
    StreamConfig(integers(8, 32), "fp16", block_k=64, num_stages=4),
]
COMPILED = golden.worth_compiling(CONFIGS, GemmSpec)


@pytest.mark.parametrize("config", COMPILED, ids=lambda config: config.name)
def test_it_compiles_without_spills(config: StreamConfig):
    spec = GemmSpec(config)
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0


def test_mma_and_additions_are_as_many_as_the_codes_need():
    """A k block of 128 inputs: 8 products, and for each of its 8 k16 steps 4 packed additions."""
    spec = GemmSpec(StreamConfig(integers(4), "bf16"))
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert kernel["opcodes"]["HMMA"] == 8
    assert 32 <= kernel["opcodes"]["HADD2"] <= 36


def test_what_cannot_be_implemented_is_refused():
    with pytest.raises(ValueError, match="config: dtype 'fp32' is not one of bf16, fp16"):
        GemmSpec(StreamConfig(integers(4), "fp32")).compile(ARCH)


SHARED = WgmmaConfig(integers(4), "bf16", num_stages=5, multicast=2, reduction=WorkspaceSplitK())
IN_ROWS = WgmmaConfig(integers(8), "bf16", row_parts=2, num_stages=4, reduction=RowCuts())
WGMMA_CONFIGS = [
    WgmmaConfig(integers(4), "bf16", num_stages=5),
    WgmmaConfig(integers(4, 32, True), "bf16", num_stages=5),
    WgmmaConfig(integers(4, 128, True), "fp16", tile_m=128, n_tiles=2, num_stages=6),
    WgmmaConfig(integers(8, 64, True), "bf16", tile_m=128, n_tiles=2, num_stages=5),
    WgmmaConfig(
        integers(4, 0, True), "bf16", tile_m=64, n_tiles=2, block_k=128, num_stages=4, reduction=WorkspaceSplitK()
    ),
    WgmmaConfig(integers(8, 256), "fp16", tile_m=128, block_k=128, num_stages=3, reduction=WorkspaceSplitK()),
    WgmmaConfig(
        integers(4, 128, True),
        "bf16",
        tile_m=32,
        n_tiles=2,
        warpgroups=3,
        block_k=128,
        num_stages=6,
        reduction=WorkspaceSplitK(),
    ),
    WgmmaConfig(integers(4), "bf16", num_stages=5, reduction=RowExchange()),
    WgmmaConfig(integers(8), "bf16", tile_m=128, block_k=128, num_stages=3, reduction=RowExchange()),
    WgmmaConfig(integers(4), "bf16", num_stages=5, multicast=2),
    SHARED,
]
EVEN = WgmmaConfig(
    integers(8),
    "bf16",
    tile_m=128,
    block_k=128,
    num_stages=3,
    mainloop=RegisterWgmma(in_flight=2),
    reduction=WorkspaceSplitK(),
)
WGMMA_CONFIGS += [EVEN, replace(EVEN, format=integers(4), tile_m=64, num_stages=7)]
WGMMA_CONFIGS.append(replace(EVEN, format=FP8_BLOCK, mainloop=ScaledSums(in_flight=2)))
BETWEEN = {shape[0] for shape in BETWEEN_SHAPES}
WGMMA_CONFIGS += [  # tiles for numbers of rows in between, in formats of more and of less decoding
    config
    for form in ((integers(4), "bf16"), (integers(4, 32, True), "bf16"), (integers(8, 64, True), "fp16"))
    for config in candidate_configs(LinearProblem(8192, 8192, 8192, 8192, *form))
    if config.tile_m in BETWEEN and config.can_implement() is None and not config.limbs
]
SQUARE = WgmmaConfig(
    integers(4),
    "bf16",
    tile_m=128,
    block_k=128,
    num_stages=4,
    mainloop=RegisterWgmma(in_flight=2),
    reduction=WorkspaceSplitK(),
)
INTERLEAVED = {  # tiles whose warpgroups take turns: what ships, and other formats
    config: None
    for form in (
        *DSMEM_FORMS,
        (integers(4, 32, True), "bf16"),
        (integers(4, 0, True), "fp16"),
        (integers(4, 0), "bf16"),
        (integers(8, 64, True), "fp16"),
    )
    for rows in (16, 32, 64)
    for config in dsmem_configs(LinearProblem(rows, 8192, 8192, 8192, *form))
}
FEW_FEATURES = [LinearProblem(rows, 1024, 8192, 8192, *form) for form in DSMEM_FORMS[:2] for rows in (32, 64, 96)]
WIDE = [config for one in FEW_FEATURES for config in wide_configs(one)]
INTERLEAVED |= dict.fromkeys(config for config in WIDE if config.k_warpgroups > 1)
WGMMA_CONFIGS += [config for config in WIDE if config.k_warpgroups == 1]
MULTIPLIED, IN_TURN = (golden.worth_compiling(of, GemmSpec) for of in (WGMMA_CONFIGS, INTERLEAVED))
OPCODES = {
    SQUARE: {"LOP3": 4, "SHF": 1, "HFMA2": 4},
    replace(SQUARE, format=integers(8), store=StagedStore(32)): {"LOP3": 2, "PRMT": 2, "HFMA2": 4},
    replace(SQUARE, format=integers(4, zero_points=True)): {"LOP3": 4, "SHF": 1, "HADD2": 4, "HMUL2": 4},
}
COUNTED = {config: OPCODES[config] for config in golden.worth_compiling(OPCODES, GemmSpec)}


MOST_PREFETCHED_BYTES = 24 << 10  # of a CTA: with more, x came later (docs/design/weight_only_few_rows.md)
PREFETCHING = [
    config
    for config in dsmem_configs(LinearProblem(16, 4096, 4096, 4096, integers(4), "bf16"))
    if config.prefetched_k_blocks
]
PREFETCHING_RESIDENT = [
    WgmmaConfig(
        integers(4),
        "bf16",
        tile_m=8,
        warpgroups=warpgroups,
        block_k=128,
        num_stages=6,
        mainloop=ResidentLimbs(16, loads=loads),
        reduction=Dsmem(2, k_warpgroups),
    )
    for warpgroups, k_warpgroups, loads in ((2, 2, True), (4, 2, False), (4, 1, True))
]


# Of E4M3: groups of half an MMA, and 8-bit codes.
E4M3_LIMBS = [chosen(LinearProblem(1, 8192, 8192, 8192, form, "bf16")).config for form in (NVFP4, FP8_BLOCK)]
ASKING = golden.worth_compiling([*PREFETCHING, *PREFETCHING_RESIDENT], GemmSpec)

MULTICAST = WgmmaConfig(integers(4), "bf16", tile_m=64, num_stages=5, multicast=2)
LARGE = golden.worth_compiling([SHARED, IN_ROWS], GemmSpec)
# What other tests compile: a product of its kind each time, and those that cut rows, where they are drawn.
COPYING = [*COUNTED, *(config for config in (*LARGE, *MULTIPLIED) if config in (IN_ROWS, WGMMA_CONFIGS[7]))]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this file at once: one by one, each would wait for a compiler to start."""
    products = (*MULTIPLIED, *LARGE, *IN_TURN, *COUNTED, *ASKING, *E4M3_LIMBS, MULTICAST)
    streams = [StreamConfig(integers(4), "bf16"), *COMPILED]
    golden.artifacts([*map(GemmSpec, streams), *map(GemmSpec, products)], default_cache())


def compiled_apart(spec: KernelSpec) -> Artifact:
    """Compiled by a worker: in this process, functions that were compiled once no longer run as plain Python, as tests
    that play kernels want it."""
    (artifact,) = default_cache().artifacts([spec], ARCH)
    return artifact


@pytest.mark.parametrize("config", E4M3_LIMBS, ids=lambda config: config.name)
def test_limbs_in_e4m3_do_not_spill_and_have_two_mmas_for_32_inputs_of_a_tile(config: WgmmaConfig):
    spec = GemmSpec(config)
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    assert config.limbs and kernel["opcodes"]["QGMMA"] == 2 * config.block_k // 32 * config.n_tiles


@pytest.mark.parametrize("config", MULTIPLIED, ids=lambda config: config.name)
def test_warpgroup_mmas_run_side_by_side_with_decoding(config: WgmmaConfig):
    """No spills, and no more waits and fences than are written: the compiler has not put MMAs one after the other."""
    spec = GemmSpec(config)
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    groups = config.k_block_steps // config.mainloop.group_steps
    assert kernel["opcodes"]["HGMMA"] == config.k_block_steps * config.n_tiles
    assert kernel["opcodes"]["WARPGROUP"] == 2 * groups + 1


@pytest.mark.parametrize("config", IN_TURN, ids=lambda config: config.name)
def test_mmas_run_side_by_side_where_warpgroups_take_turns(config: WgmmaConfig):
    """As above, a loop for each number of parts of rows."""
    spec = GemmSpec(config)
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    loops, groups = len(config.loop_parts), config.k_block_steps // config.mainloop.group_steps
    assert kernel["opcodes"]["HGMMA"] == config.k_block_steps * config.n_tiles * loops
    assert kernel["opcodes"]["WARPGROUP"] == 2 * groups * loops + 1


@pytest.mark.parametrize(
    "config",
    [*MULTIPLIED, *(config for config in IN_TURN if config.row_parts == 1)],
    ids=lambda config: config.name,
)
def test_operands_stay_until_the_mmas_that_read_them_are_done(config: WgmmaConfig, tmp_path):
    """Versions of ptxas before 13.3 could use registers of A again while an MMA read them.

    13.3 does so with those of accumulators where it knows that no MMA to come reads them.
    """
    artifact = compiled_apart(GemmSpec(config))
    loop = machine_code.main_loop(machine_code.instructions(artifact.object_code, tmp_path))
    assert sum(opcode.startswith("HGMMA") for _, opcode, _ in loop) == config.k_block_steps * config.n_tiles
    assert machine_code.early_writes(loop) == []


@pytest.mark.parametrize("config, per_step", COUNTED.items(), ids=lambda value: getattr(value, "name", ""))
def test_a_code_takes_no_more_than_what_is_written(config: WgmmaConfig, per_step: dict[str, int], tmp_path):
    """A mask for two codes, one HFMA2 for their weights, and none made or copied again; four more with zero points."""
    artifact = compiled_apart(GemmSpec(config))
    loop = machine_code.main_loop(machine_code.instructions(artifact.object_code, tmp_path))
    steps = config.k_block_steps
    for name, count in per_step.items():
        assert count * steps <= sum(opcode.startswith(name) for _, opcode, _ in loop) <= count * steps + 4, name
    copies = [operands for _, opcode, operands in loop if opcode.startswith(("IMAD.U32", "MOV")) and ", UR" in operands]
    assert len(copies) <= 2


@pytest.mark.parametrize("config", COPYING, ids=lambda config: config.name)
def test_copies_come_first_and_wait_for_no_division(config: WgmmaConfig, tmp_path):
    """Integer division goes by way of floats. The code of the first copies is at the front: a launch waits for it."""
    opcodes = [
        opcode for _, opcode, _ in machine_code.instructions(compiled_apart(GemmSpec(config)).object_code, tmp_path)
    ]
    copies = [place for place, opcode in enumerate(opcodes) if opcode.startswith(("UBLKCP.S.G", "UTMALDG"))]
    assert copies and copies[0] < 200 and copies[-1] < 300
    assert not any(opcode.startswith(("I2F", "MUFU", "HGMMA")) for opcode in opcodes[: copies[-1]])


@pytest.mark.parametrize("config", ASKING, ids=lambda config: config.name)
def test_first_k_blocks_are_asked_for_before_barriers_are_there(config: WgmmaConfig, tmp_path):
    """One instruction a tile, before the first copy and most barriers."""
    code = machine_code.instructions(compiled_apart(GemmSpec(config)).object_code, tmp_path)
    opcodes = [opcode for _, opcode, _ in code]
    asks = [place for place, opcode in enumerate(opcodes) if opcode == "UBLKPF.L2"]
    assert len(asks) == config.block_tiles
    assert asks[-1] < opcodes.index("UBLKCP.S.G") < 150
    made = [place for place, opcode in enumerate(opcodes) if opcode == "SYNCS.EXCH.64"]
    assert sum(place > asks[-1] for place in made) > len(made) / 2
    assert config.prefetched_k_blocks * config.code_stage_bytes <= MOST_PREFETCHED_BYTES


def test_shared_activations_are_multicast(tmp_path):
    """One copy of a TMA tile in the code, and two barriers of the cluster: before the first of them, after the last."""
    artifact = compiled_apart(GemmSpec(MULTICAST))
    opcodes = [opcode for _, opcode, _ in machine_code.instructions(artifact.object_code, tmp_path)]
    copies = [opcode for opcode in opcodes if opcode.startswith("UTMALDG")]
    assert len(copies) == 1 and "MULTICAST" in copies[0]
    assert sum(opcode.startswith("UCGABAR_ARV") for opcode in opcodes) == 2
    # Only who leaves waits for memory of the GPU: who meets would do so before the first copy.
    assert opcodes.count("MEMBAR.ALL.GPU") == 1


@pytest.mark.parametrize("config", LARGE, ids=lambda config: config.name)
def test_large_tiles_have_a_loop_for_each_number_of_parts_and_do_not_spill(config: WgmmaConfig):
    spec = GemmSpec(config)
    (kernel,) = golden.measure([spec], default_cache())[spec.symbol]
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    assert kernel["opcodes"]["HGMMA"] == config.k_block_steps * config.row_parts


def test_an_early_write_is_seen():
    mma = ("", "HGMMA.64x64x16.F32.BF16", "R24, R8, gdesc[UR4], R24, gsb0")
    wait = ("", "WARPGROUP.DEPBAR.LE", "gsb0, 0x1")
    other = ("", "HGMMA.64x64x16.F32.BF16", "R24, R12, gdesc[UR4], R24, gsb0")
    write = ("", "LDS.64", "R10, [R2]")
    assert machine_code.early_writes([mma, write, other, wait]) != []
    assert machine_code.early_writes([mma, other, wait, write]) == []
    assert machine_code.early_writes([mma, other, wait, ("", "LOP3.LUT", "R33, R33, R2, RZ")]) != []
