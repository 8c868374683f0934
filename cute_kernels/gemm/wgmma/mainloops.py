"""Mainloop policies of kernels of tiles: how consumer warps multiply.

A policy has fields, limits, registers, shared memory, barriers, and a part of the kernel's name. The docstring of a
policy names the module of its device code. A policy lists the reductions (`.results`) that it can be compiled with.
There are no GPU types here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.arguments import TILES, TILES_KERNEL, CompiledAs
from cute_kernels.gemm.wgmma.regions import Barriers, Region
from cute_kernels.gemm.wgmma.results import (
    CHUNK_M,
    TMA_TILE_ALIGNMENT,
    WGMMA_N_STEP,
    Dsmem,
    RangeSplitK,
    Reduction,
    RowCuts,
    RowExchange,
    SequentialSplitK,
    WholeK,
    WorkspaceSplitK,
)
from cute_kernels.runtime.spec import one_of
from layouts.weights.hopper import STEP_K, TILE_N

if TYPE_CHECKING:
    from cute_kernels.gemm.stream.config import StreamConfig
    from cute_kernels.gemm.wgmma.config import WgmmaConfig

_ROOM = "cute_kernels.gemm.wgmma"
WARPGROUP_THREADS = 4 * WARP_THREADS
TMA_TILE_K = 64  # inputs of a TMA tile of activations: rows of 128 bytes, what swizzling permutes
MOST_LOOPS = 4  # one for each number of row parts; with more of them ptxas serialises the MMAs
MMA_GROUP = 32  # inputs of an MMA of bytes
LIMB_GROUP = 128  # inputs of a row of x that share a scale where x comes in limbs: rows of a TMA tile of bytes
ROW_LIMB_BYTES = 2 * LIMB_GROUP  # both limbs of so many inputs of a row,
ROW_SCALE_BYTES = 4  # and their scale
LIMB_TILE_M = 64  # rows of x whose two limbs are the columns of one MMA
X_SCALE_ALIGNMENT = 4  # fp32 scales in 16 bytes, where copies begin: a tile's first scale is any of them
FLOAT_BYTES = 4
THREE_WARPGROUPS_SUMS_M = 48  # rows of all tiles of a warpgroup whose sums fit beside the accumulators in 160 registers
SYNCHRONOUS_TILE_M = 32  # rows of x of the widest synchronous tile
# K blocks of each tile that are asked into L2 before a CTA makes its barriers, as measured for tiles with a DSMEM
# reduction of up to PREFETCHED_TILE_M rows: by the bits of a code and the tiles of a block.
PREFETCHED_K_BLOCKS = {(4, 1): 4, (4, 2): 3, (8, 1): 2}
PREFETCHED_TILE_M = 32
# The same of resident limbs, by the tiles of a block and whether warps load x. What TMA brings of x comes after it.
# Measured on an H100, 2026-11-25: 0.5 to 1.5 % of a launch (docs/design/weight_only_few_rows.md).
RESIDENT_PREFETCHED_K_BLOCKS = {(1, True): 4, (1, False): 2, (2, False): 2, (4, True): 1, (4, False): 1}


class Mainloop(ABC):
    """The base of mainloop policies, which say how consumer warps multiply a k block, and how x reaches shared memory.

    Attributes:
        reductions: types of reductions that can be combined with the mainloop.
        scales_codes: whether the instruction that decodes codes may also scale them, if the format has such an
            instruction.
        limbs: whether x is two limbs of 8 bits with a scale per row and `LIMB_GROUP` inputs. With int8 limbs, products
            are exact in int32.
        scaled_rows: whether an earlier launch makes x, with an fp32 scale for each row and k block.
        registers: number of registers of a consumer thread, indexed by the number of warpgroups.
        producer_registers: number of registers of a producer thread.
        more_threads: number of threads in addition to the consumer warpgroups.
        copies: number of warps that copy into a stage.
        multicasts: whether neighbouring CTAs may multicast activations.
        rows_apart: whether the x of a dense product may have gaps between its rows, since TMA loads x itself.
        limits: the limits of the architecture whose instructions the mainloop uses.
        spare: how many fewer tiles of 64 features the last warpgroup has than each other warpgroup.
        half_last: whether K may end in half a k block, so that the last k block overlaps the one before.
        made_by: "module:name" of the class of device code, a `.consumers.TileMainloop`. Its constructor takes a
            configuration and `.reading.MainloopParts`. "" if the mainloop has its own kernel.
        weights_by: "module:name" of the device code that loads weights.
    """

    made_by: ClassVar[str] = ""
    weights_by: ClassVar[str] = f"{_ROOM}.loads:WeightLoads"
    reductions: ClassVar[tuple[type[Reduction], ...]]
    scales_codes: ClassVar[bool] = False
    limbs: ClassVar[bool] = False
    scaled_rows: ClassVar[bool] = False
    registers: ClassVar[dict[int, int]] = {1: 240, 2: 240, 3: 160}  # with the producers', all that an SM has
    producer_registers: ClassVar[int] = 24
    more_threads: ClassVar[int] = WARPGROUP_THREADS  # producer warps: registers are given to whole warpgroups
    copies: ClassVar[int] = 2  # of activations and of weights
    multicasts: ClassVar[bool] = False
    rows_apart: ClassVar[bool] = False
    limits: ClassVar[Limits] = HOPPER
    tile_m_sizes: ClassVar[tuple[int, ...]] = (8, *range(16, 257, 16))  # whole eights; stmatrix turns two of them
    n_tiles_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    block_k_sizes: ClassVar[tuple[int, ...]] = (64, 128)
    most_acc_m: ClassVar[int] = 256  # rows of all tiles of a warpgroup whose accumulators a thread has registers for
    spare: int = 0
    half_last: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The mainloop's part of a kernel's name. The stages' part comes after it."""

    @property
    def code(self) -> tuple[str, ...]:
        """The import paths of the mainloop's device code, which is part of kernels' keys."""
        return (self.made_by, self.weights_by) if self.made_by else ()

    def kernel(self) -> CompiledAs:
        """Returns how a configuration with this mainloop is compiled."""
        return TILES_KERNEL

    def kernel_name(self, config: WgmmaConfig) -> str:
        """Returns the kernel's name for a configuration with this mainloop."""
        parts = f"p{config.row_parts}" if config.row_parts > 1 else ""
        shape = f"m{config.tile_m}{parts}n{TILE_N * config.n_tiles}x{config.warpgroups}k{config.block_k}"
        stages = f"r{config.num_stages}" + (f"c{config.store.chunk}" if config.store.chunk != CHUNK_M else "")
        end = f"{config.reduction.name}{f'_multicast{config.multicast}' if config.multicast > 1 else ''}"
        return f"linear_wgmma_{config.weight_name}_{shape}_{self.name}{stages}{end}"

    def x_tma_tiles(self, config: WgmmaConfig) -> int:
        """Returns the number of TMA tiles of activations in a k block; each has 128 bytes of every row."""
        return config.block_k // TMA_TILE_K

    def x_stage_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes that activations take in a stage."""
        return self.x_tma_tiles(config) * config.tma_tile_bytes

    def x_scale_stage_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes that the scales of a tile's rows of x take in a stage."""
        return 0

    def x_scale_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes of shared memory for scales of rows of x, over all stages."""
        return config.num_stages * self.x_scale_stage_bytes(config)

    def x_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes of shared memory for activations, over all stages."""
        return config.num_stages * self.x_stage_bytes(config)

    def regions(self, config: WgmmaConfig) -> tuple[Region, ...]:
        """Returns the shared memory of the operands: first the activations, then the weights, then the scales of
        activations."""
        stages = config.num_stages
        return (
            Region("x", self.x_bytes(config), TMA_TILE_ALIGNMENT),
            Region("codes", stages * config.code_stage_bytes),
            Region("scales", stages * config.scale_stage_bytes),
            Region("zeros", stages * config.zero_stage_bytes),
            Region("x_scales", self.x_scale_bytes(config)),
        )

    def barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        """Returns the pipeline's mbarriers: full and empty stages."""
        return (
            Barriers("full", config.num_stages, config.mainloop.copies),
            Barriers("empty", config.num_stages, config.stage_warps),
        )

    def more_barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        """Returns additional mbarriers, which the mainloop's device code initialises itself. They lie after all other
        mbarriers.
        """
        return (Barriers("x_barrier", 0),)

    def shared_memory(self, config: WgmmaConfig) -> tuple[Region, ...]:
        """Returns all regions of a CTA's shared memory, in order."""
        return (*self.regions(config), *config.store.regions(config), *config.reduction.regions(config))

    def prefetched_k_blocks(self, config: WgmmaConfig) -> int:
        """Returns how many k blocks of codes, of each tile, a CTA prefetches into L2 before it initialises its
        barriers."""
        return 0

    def problem(self, config: WgmmaConfig) -> str | None:
        """Returns why a configuration cannot have this mainloop, or None."""
        return None


@dataclass(frozen=True)
class RegisterWgmma(Mainloop):
    """The mainloop of wgmma with decoded weights in registers. Its code is in `.register_mainloop`.

    Attributes:
        group_steps: number of k16 steps that are decoded and then multiplied as one commit group of MMAs.
        in_flight: number of commit groups that run while the next commit group is decoded.
    """

    group_steps: int = 2
    in_flight: int = 1
    made_by: ClassVar[str] = f"{_ROOM}.register_mainloop:RegisterMainloop"
    reductions: ClassVar[tuple[type[Reduction], ...]] = (
        WholeK, RowCuts, WorkspaceSplitK, RangeSplitK, SequentialSplitK, RowExchange, Dsmem,
    )  # fmt: skip
    block_k_sizes: ClassVar[tuple[int, ...]] = (64, 128, 256)
    scales_codes: ClassVar[bool] = True
    multicasts: ClassVar[bool] = True
    rows_apart: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"s{self.group_steps}{f'f{self.in_flight}' if self.in_flight > 1 else ''}"

    def prefetched_k_blocks(self, config: WgmmaConfig) -> int:
        if not config.reduction.dsmem or config.tile_m > PREFETCHED_TILE_M:
            return 0
        return PREFETCHED_K_BLOCKS.get((config.format.bits, config.block_tiles), 0)

    def problem(self, config: WgmmaConfig) -> str | None:
        steps = config.k_block_steps
        if reason := one_of(self.group_steps, (1, 2, 4), "group_steps") or one_of(
            self.in_flight, (1, 2, 3), "in_flight"
        ):
            return reason
        if steps % (2 * self.group_steps):
            # Operands take turns in two sets of registers, and each k block begins with the first.
            return f"block_k {config.block_k} is not an even number of {self.group_steps} steps of {STEP_K}"
        if self.in_flight * self.group_steps >= steps:
            # The previous k block's stage is released within this one, once no group of that k block is in flight.
            return f"{self.in_flight} groups of {self.group_steps} steps are not less than block_k {config.block_k}"
        return None


@dataclass(frozen=True)
class ScaledSums(RegisterWgmma):
    """The mainloop of `RegisterWgmma` that scales the sums of a k block instead of its weights. Its code is in
    `.scaled_sums`.

    It is for fp32 scales of whole k blocks. Scaling two weights takes two multiplications and a conversion, as many
    instructions as decoding them. Scaling the sums of a k block takes a thread ``tile_m / 2`` multiplications. The sums
    need registers of their own, so tiles have at most 128 rows.
    """

    made_by: ClassVar[str] = f"{_ROOM}.scaled_sums:ScaledSumsMainloop"
    scales_codes: ClassVar[bool] = False
    most_acc_m: ClassVar[int] = 128

    @property
    def name(self) -> str:
        return f"{super().name}sums"

    def problem(self, config: WgmmaConfig) -> str | None:
        form = config.format
        if form.scale_bytes != FLOAT_BYTES or form.sums_inputs or form.row_scales or config.k_block_groups != 1:
            return f"sums want one fp32 scale for all of a k block, not {form.key} with k blocks of {config.block_k}"
        if config.warpgroups == 3 and config.n_tiles * config.tile_m > THREE_WARPGROUPS_SUMS_M:
            return f"threads of three warpgroups spill sums of {config.n_tiles} tiles of {config.tile_m} rows"
        return super().problem(config)


@dataclass(frozen=True)
class MmaSync(Mainloop):
    """The mainloop of mma.sync for few rows. Each warp multiplies on its own and scales accumulators. Its code is in
    `.synchronous`."""

    made_by: ClassVar[str] = f"{_ROOM}.synchronous:SynchronousMainloop"
    reductions: ClassVar[tuple[type[Reduction], ...]] = (WholeK, WorkspaceSplitK)
    registers: ClassVar[dict[int, int]] = {2: 224}
    producer_registers: ClassVar[int] = 56  # with the consumers' 224, all that 384 threads have
    name: ClassVar[str] = "s2mmasync"

    def problem(self, config: WgmmaConfig) -> str | None:
        if config.tile_m > SYNCHRONOUS_TILE_M:
            return f"{config.tile_m} rows are more than the {SYNCHRONOUS_TILE_M} of synchronous tiles"
        return None


def takes_limbs(form: WeightFormat, dtype: str) -> bool:
    """Returns whether a format's codes can be multiplied by limbs of activations of ``dtype``. Two E4M3 limbs hold the
    8 significant bits of bf16, but not the 11 bits of fp16."""
    if form.bytes_in_e4m3:
        return form.codes_as_bytes and dtype == "bf16"
    return form.codes_as_bytes and not form.row_scales and form.group_size >= MMA_GROUP


def row_columns(form: WeightFormat) -> int:
    """Returns how many columns of a byte MMA a row of x takes. It is the number of groups that the MMA's inputs belong
    to.
    """
    return max(MMA_GROUP // form.group_size, 1) if form.group_size else 1


def limb_groups(config: WgmmaConfig[Any] | StreamConfig[Any]) -> int:
    """Returns the number of parts of a k block for which a lane has separate accumulators. With int8 limbs, a part is a
    scale group. With E4M3 limbs, a part is the inputs of one MMA, as tensor cores add E4M3 products with few bits.
    """
    return LIMB_GROUP // MMA_GROUP if config.format.bytes_in_e4m3 else config.k_block_groups


def stored_group(config: WgmmaConfig[Any] | StreamConfig[Any], part: int) -> int:
    """Returns the index, in a k block, of the group whose scales are applied to the ``part``-th part of `limb_groups`.
    If an MMA has inputs of two groups, returns the index of the first group.
    """
    return part * config.k_block_groups // limb_groups(config)


def limb_problem(config: WgmmaConfig, *, zeros: bool = False, least: int = LIMB_GROUP) -> str | None:
    """Returns why a configuration's weights cannot be multiplied by limbs, or None.

    zeros: whether the mainloop can correct for zero points. least: the smallest supported group size, for codes without
    zero points.
    """
    if not takes_limbs(config.format, config.dtype) or (config.format.sums_inputs and not zeros):
        wanted = f"codes that are bytes{'' if zeros else ', without zero points'}"
        return f"limbs want {wanted}, not {config.format.key} with {config.dtype}"
    least = LIMB_GROUP if config.format.sums_inputs else least // row_columns(config.format)
    if config.group_size < least:
        return f"limbs want groups of at least {least} inputs, not {config.group_size}"
    return None


@dataclass(frozen=True)
class Limbs(Mainloop):
    """The mainloop of int8 MMAs for grouped products. An earlier launch makes the limbs of x. Its code is in
    `.limbs`."""

    made_by: ClassVar[str] = f"{_ROOM}.limbs:LimbMainloop"
    reductions: ClassVar[tuple[type[Reduction], ...]] = (WholeK,)
    limbs: ClassVar[bool] = True
    scaled_rows: ClassVar[bool] = True
    block_k_sizes: ClassVar[tuple[int, ...]] = (LIMB_GROUP,)

    name: ClassVar[str] = "s2limbs"

    def x_scale_stage_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes of a stage's fp32 scales of x, with room for a copy that begins at a multiple of 16
        bytes."""
        return ROW_SCALE_BYTES * (config.tile_m + X_SCALE_ALIGNMENT)

    def problem(self, config: WgmmaConfig) -> str | None:
        if reason := limb_problem(config):
            return reason
        if config.format.bytes_in_e4m3:
            return f"limbs that a launch makes are integers, not the E4M3 that {config.format.key} wants"
        if config.row_parts > MOST_LOOPS:
            return f"{config.row_parts} parts of rows whose limbs follow one another want a loop for each"
        if config.tile_m > LIMB_TILE_M:
            return f"{config.tile_m} rows are more than the {LIMB_TILE_M} whose limbs an MMA takes"
        return None


@dataclass(frozen=True)
class ResidentLimbs(Mainloop):
    """The mainloop of byte MMAs with resident limbs. Consumer warps make the limbs of x before the first weights
    arrive. Its code is in `.resident_kernel`.

    x does not go through the pipeline: stages hold weights only, and one warp copies them. Consumer warps keep the
    registers that they are launched with. A CTA of a cluster has one part of K of one tile.

    Attributes:
        k_blocks: number of k blocks of x whose limbs fit in the shared memory reserved for them. A k block is 128
            inputs of all rows of a tile.
        loads: True: consumer warps load x, only the rows that exist. False: TMA loads x in whole TMA tiles, and takes
            long to write zeros for missing rows.
        spare: as in `Mainloop`. It allows blocks with an odd number of tiles, so that there can be as many blocks as
            SMs.

    Zero points and shifts are multiplied by sums of a group's inputs. The warps that make limbs compute these sums for
    each row of x. Each group of fewer than 128 inputs has its own accumulators.
    """

    k_blocks: int = 64
    loads: bool = False
    spare: int = 0
    reductions: ClassVar[tuple[type[Reduction], ...]] = (Dsmem,)
    limbs: ClassVar[bool] = True
    registers: ClassVar[dict[int, int]] = {2: 0, 4: 0}
    more_threads: ClassVar[int] = WARP_THREADS
    copies: ClassVar[int] = 1
    tile_m_sizes: ClassVar[tuple[int, ...]] = (WGMMA_N_STEP, 2 * WGMMA_N_STEP)
    n_tiles_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    block_k_sizes: ClassVar[tuple[int, ...]] = (LIMB_GROUP,)

    name: ClassVar[str] = "s2limbs"

    def kernel(self) -> CompiledAs:
        return CompiledAs("cute_kernels.gemm.wgmma.resident_kernel:ResidentKernel", TILES)

    def kernel_name(self, config: WgmmaConfig) -> str:
        spare = f"less{self.spare}" if self.spare else ""
        return f"{super().kernel_name(config)}_resident{self.k_blocks}{spare}{'loads' * self.loads}"

    def x_stage_bytes(self, config: WgmmaConfig) -> int:
        return 0

    def k_block_limb_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes of both limbs of a k block: 128 inputs of all rows of a tile."""
        return ROW_LIMB_BYTES * config.tile_m

    def x_scale_bytes(self, config: WgmmaConfig) -> int:
        return self.k_blocks * ROW_SCALE_BYTES * config.tile_m

    def x_bytes(self, config: WgmmaConfig) -> int:
        return self.k_blocks * self.k_block_limb_bytes(config)

    def regions(self, config: WgmmaConfig) -> tuple[Region, ...]:
        """Returns the shared memory of the operands, with the sums of each row's inputs if the format needs them."""
        sums = (Region("x_sums", self.x_scale_bytes(config)),) if config.format.sums_inputs else ()
        return super().regions(config) + sums

    def more_barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        """Returns the mbarrier for x, which the device code initialises."""
        return (Barriers("x_barrier", 1),)

    def prefetched_k_blocks(self, config: WgmmaConfig) -> int:
        return RESIDENT_PREFETCHED_K_BLOCKS.get((config.block_tiles, self.loads), 0)

    def problem(self, config: WgmmaConfig) -> str | None:
        if reason := limb_problem(config, zeros=True, least=MMA_GROUP) or one_of(config.row_parts, (1,), "row_parts"):
            return reason
        if row_columns(config.format) > 1 and not self.loads:
            return f"TMA does not bring groups of {config.group_size} inputs of a row into columns of their own"
        if row_columns(config.format) > 1 and config.tile_m > WGMMA_N_STEP:
            return f"groups of {config.group_size} inputs want tiles of {WGMMA_N_STEP} columns, not {config.tile_m}"
        if self.spare not in range(config.n_tiles):
            return f"spare {self.spare} is not one of 0 to {config.n_tiles - 1}"
        if self.k_blocks % (2 * config.reduction.k_warpgroups):
            # Otherwise a chunk would end within a round of warpgroups, and the pipeline go on with another's stage.
            return f"room for {self.k_blocks} k blocks is not two halves of rounds of {config.reduction.k_warpgroups}"
        return None


# What a configuration has where nothing else is said.
REGISTER_WGMMA = RegisterWgmma()
