"""Every compile-time choice of the weight-only GEMM for many rows, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

from cute_kernels.sm90 import BARRIER_BYTES, MAX_SHARED_BYTES, WARP_THREADS
from cute_kernels.weight_formats import WeightFormat
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N, tile_k

WARPGROUP_WARPS = 4
WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS
TMA_TILE_K = 64  # inputs of a TMA tile of activations: rows of 128 bytes, what swizzling permutes
TMA_TILE_ALIGNMENT = 1024
TILE_M_SIZES = (8, *range(16, 257, 16))  # an MMA has whole eights, and stmatrix turns two of them around
DTYPES = ("bf16", "fp16")
CLUSTERS = (1, 2)
DSMEM_CLUSTERS = (
    2,
    3,
)  # of those that push their accumulators; clusters of more do not all run at once, one for each SM
K_WARPGROUPS = (1, 2, 3, 4)
MULTICASTS = (1, 2)
MOST_LOOPS = 4  # of more ptxas puts the MMAs one after the other
M_TILE_BAND = 8  # token tiles that are computed side by side, see `tiles.TileScheduler`
CHUNK_M = 64  # tokens that a warpgroup stores at a time, if nothing else is said
STORE_M = 64  # rows of x of a TMA tile of results,
STORE_BYTES = STORE_M * 2 * TILE_N  # of 64 features in 16 bits
STORE_BUFFERS = 2  # of TMA tiles: one is stored while the next is put together
MOST_COMBINED = 8  # vectors of another part of K that a thread asks for at a time
STAGING_PAD = 4  # words between the tokens of the staging buffer
WGMMA_N_STEP = 8  # that the fewest columns of an MMA are, and the rows among which swizzling exchanges pieces
PRODUCER_REGISTERS = 24  # of the threads that copy
# Registers of the consumer threads, by the number of their warpgroups: with the copying ones, all that an SM has.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
# The same where MMAs are synchronous: the producer warps are given more, of which none is missed.
SYNCHRONOUS_REGISTERS = {2: 224, 4: 104}
SYNCHRONOUS_PRODUCER_REGISTERS = 56
LIMB_GROUP = 128  # inputs of a row of x that share a scale where x comes in limbs: rows of a TMA tile of bytes
ROW_LIMB_BYTES = 2 * LIMB_GROUP  # both limbs of so many inputs of a row,
ROW_SCALE_BYTES = 4  # and their scale
LIMB_TILE_M = 64
AHEAD_TILE_M = 32  # for which a thread has registers to decode the next k block ahead
LIMB_ROWS_THREADS = 256  # of the kernel that makes limbs
X_SCALE_ALIGNMENT = 4  # scales of x among which a tile's first one may stand
SYNCHRONOUS_TILE_M = 64  # of all warpgroups: what 104 registers are enough for with four
# K blocks of each tile that are asked into L2 before a CTA makes its barriers, as measured for tiles that push, of up
# to PREFETCHED_TOKENS rows: by the bits of a code and the tiles of a block. See
# `copies.ProducerWarps.prefetch_k_blocks`.
PREFETCHED_K_BLOCKS = {(4, 1): 4, (4, 2): 3, (8, 1): 2}
PREFETCHED_TILE_M = 32


@dataclass(frozen=True)
class WgmmaConfig:
    """One compiled variant.

    A CTA computes tiles of ``block_rows`` output features by ``tile_m`` rows of x, one after the other. A stage of its
    pipeline holds the codes, scales and activations of a *k block* of ``block_k`` inputs.

    Attributes:
        format: of the weight.
        dtype: of activations, "bf16" or "fp16".
        tile_m: rows of x of a tile, the N of the MMAs.
        row_parts: equal parts of those rows. Each comes in TMA tiles of its own; parts behind the last row that there
            is are neither brought nor multiplied.
        n_tiles: tiles of 64 output features of a warpgroup, which multiplies them with the same activations.
        warpgroups: that multiply; each has ``n_tiles`` of its own.
        block_k: inputs of a k block.
        group_steps: k16 steps that are decoded, then multiplied, at a time: a commit group of MMAs.
        in_flight: commit groups that run while the next one is decoded.
        num_stages: pipeline stages.
        chunk: rows of x that a warpgroup stores at a time, at most; fewer leave room for another stage.
        splits_k: whether K may be cut into parts.
        cluster: CTAs of a cluster. They have equal parts of K of one tile, exchange their accumulators through shared
            memory, and each stores its share of the tile's rows of x; each CTA has one work tile. 1: no cluster.
        dsmem_reduction: whether each tile of 64 output features has a CTA of the cluster that stores it, to which the
            others publish their partials; for few rows. See `.cluster_reduction`.
        k_warpgroups: warpgroups that interleave the k blocks of one tile, with a DSMEM reduction (intra-CTA split-K):
            one decodes while another waits for its MMAs.
        multicast: CTAs of a cluster that compute neighbouring output features of the same rows of x. Each loads its
            share of the activations into the shared memory of all of them. 1: each CTA loads its own.
        cuts_rows: whether the tiles of a last round are cut into the parts of their rows of x, instead of along K.
        bulk_stores: whether results leave by TMA, where they are plain and in 16 bits. See `.tma_store`.
        synchronous: whether warps multiply by mma.sync, each for itself, and scale accumulators; for few rows.
        limbs: whether x comes as two limbs of 8 bits and a scale for each row and `LIMB_GROUP` inputs, and products
            are those of bytes, exact in int32; for few rows. See `cute_kernels.linear.wgmma.limbs`.
        ahead: whether, of limbs, the next k block is decoded while this one is multiplied. See `.limbs_ahead`.
    """

    format: WeightFormat
    dtype: str
    tile_m: int = 256
    row_parts: int = 1
    n_tiles: int = 1
    warpgroups: int = 2
    block_k: int = 64
    group_steps: int = 2
    in_flight: int = 1
    num_stages: int = 5
    chunk: int = CHUNK_M
    splits_k: bool = False
    cluster: int = 1
    dsmem_reduction: bool = False
    k_warpgroups: int = 1
    multicast: int = 1
    cuts_rows: bool = False
    bulk_stores: bool = False
    synchronous: bool = False
    limbs: bool = False
    ahead: bool = False

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; 0 for one scale per output feature."""
        return self.format.group_size

    @property
    def scales_codes(self) -> bool:
        """Whether codes are scaled by the instruction that decodes them: `WeightFormat.scaling_decoder`.

        If not, scales meet weights in a product of their own, or the accumulators of a group.
        """
        return self.format.scales_codes(self.dtype) and not (self.synchronous or self.limbs)

    @property
    def makes_limbs_before(self) -> bool:
        """Whether a launch of its own makes limbs of x."""
        return self.limbs

    @property
    def tile_k(self) -> int:
        """Inputs of a tile of codes."""
        return tile_k(self.format.bits)

    @property
    def block_tiles(self) -> int:
        """Tiles of 64 output features of a CTA."""
        return self.n_tiles * self.warpgroups // self.k_warpgroups

    @property
    def last_tiles(self) -> int:
        """Tiles of 64 output features of a CTA's last warpgroup."""
        return self.n_tiles

    @property
    def block_rows(self) -> int:
        """Output features of a CTA's tile."""
        return TILE_N * self.block_tiles

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster, whatever they do together."""
        return self.cluster * self.multicast

    @property
    def one_m_tile(self) -> bool:
        """Whether no dense product has rows of more than one tile: of those that are reduced in the cluster, or come in
        limbs."""
        return self.dsmem_reduction or self.limbs

    @property
    def prefetched_k_blocks(self) -> int:
        """K blocks of each of a block's tiles whose codes are asked into L2 before the CTA makes its barriers."""
        if not self.dsmem_reduction or self.limbs or self.tile_m > PREFETCHED_TILE_M:
            return 0
        return PREFETCHED_K_BLOCKS.get((self.format.bits, self.block_tiles), 0)

    @property
    def consumer_warps(self) -> int:
        return WARPGROUP_WARPS * self.warpgroups

    @property
    def epilogue_warps(self) -> int:
        """Warps that store results together: those of a warpgroup."""
        return WARPGROUP_WARPS

    @property
    def num_threads(self) -> int:
        """Consumer warpgroups, and one of producer warps: registers are given to whole warpgroups."""
        return (self.warpgroups + 1) * WARPGROUP_THREADS

    @property
    def consumer_registers(self) -> int:
        """Of a consumer thread."""
        return (SYNCHRONOUS_REGISTERS if self.synchronous else CONSUMER_REGISTERS)[self.warpgroups]

    @property
    def producer_registers(self) -> int:
        """Of a thread that copies."""
        return SYNCHRONOUS_PRODUCER_REGISTERS if self.synchronous else PRODUCER_REGISTERS

    @property
    def thread_acc(self) -> int:
        """fp32 accumulators of a thread."""
        return self.n_tiles * self.tile_m // 2

    @property
    def thread_vectors(self) -> int:
        """Of four accumulators of a thread."""
        return self.thread_acc // 4

    @property
    def combine_batch(self) -> int:
        """Vectors of another part of K that a thread asks for at a time: all of them are in one batch, none beside."""
        return gcd(MOST_COMBINED, self.thread_vectors)

    @property
    def own_m(self) -> int:
        """Rows of x of a tile that a CTA stores."""
        return self.tile_m // (1 if self.dsmem_reduction else self.cluster)

    @property
    def partial_slots(self) -> int:
        """Tiles of 64 output features whose parts of K a CTA of a cluster is sent, at most."""
        return -(-self.block_tiles // self.cluster) if self.dsmem_reduction else 0

    @property
    def partial_bytes(self) -> int:
        """A tile of 64 output features' accumulators of a part of K in fp32."""
        return 4 * TILE_N * self.tile_m

    @property
    def received_bytes(self) -> int:
        """Shared memory for what a CTA is sent by the others of its cluster."""
        return self.partial_slots * (self.cluster - 1) * self.partial_bytes

    @property
    def partials_bytes(self) -> int:
        """Shared memory for the parts of K of a cluster's tiles: those that are sent, and those of other turns."""
        return self.received_bytes + self.block_tiles * (self.k_warpgroups - 1) * self.partial_bytes

    @property
    def k_block_steps(self) -> int:
        return self.block_k // STEP_K

    @property
    def k_block_tiles(self) -> int:
        return self.block_k // self.tile_k

    @property
    def k_block_groups(self) -> int:
        """Groups that a k block has a part of; 0 where scales are per output feature."""
        return -(-self.block_k // self.group_size) if self.group_size else 0

    @property
    def part_m(self) -> int:
        """Rows of x of a TMA tile."""
        return self.tile_m // self.row_parts

    @property
    def loop_parts(self) -> tuple[int, ...]:
        """Numbers of parts for which there is a loop of its own; fewer are multiplied as if they were as many."""
        parts = range(1, self.row_parts + 1)
        if self.row_parts <= MOST_LOOPS:
            return tuple(parts)
        return tuple(count for count in parts if count % 2 == 0 or count > self.row_parts - 2)

    def loop_m(self, present: int) -> int:
        """Rows of x that are multiplied where ``present`` parts have some."""
        return self.part_m * next(count for count in self.loop_parts if count >= present)

    @property
    def tma_tile_bytes(self) -> int:
        """A tile's activations of BOX_K inputs."""
        return 2 * TMA_TILE_K * self.tile_m

    @property
    def x_stage_bytes(self) -> int:
        return self.block_k // TMA_TILE_K * self.tma_tile_bytes

    @property
    def x_scale_stage_bytes(self) -> int:
        """Scales of a tile's rows of x in fp32, from a multiple of 16 bytes on."""
        return ROW_SCALE_BYTES * (self.tile_m + X_SCALE_ALIGNMENT) if self.limbs else 0

    @property
    def x_scale_bytes(self) -> int:
        """Shared memory for scales of rows of x."""
        return self.num_stages * self.x_scale_stage_bytes

    @property
    def code_stage_bytes(self) -> int:
        return self.block_tiles * self.k_block_tiles * TILE_BYTES

    @property
    def scale_stage_bytes(self) -> int:
        return self.block_tiles * self.k_block_groups * self.format.group_scale_bytes

    @property
    def zero_stage_bytes(self) -> int:
        return self.block_tiles * self.k_block_groups * self.format.group_zero_bytes

    @property
    def weight_stage_bytes(self) -> int:
        """Codes, scales and zero points of a stage."""
        return self.code_stage_bytes + self.scale_stage_bytes + self.zero_stage_bytes

    @property
    def stage_bytes(self) -> int:
        return self.x_stage_bytes + self.x_scale_stage_bytes + self.weight_stage_bytes

    @property
    def chunk_m(self) -> int:
        """Tokens that a warpgroup stores at a time, at most."""
        return min(self.chunk, self.own_m)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(first token, tokens) of what a warpgroup stores at a time, of a tile's."""
        starts = range(0, self.own_m, self.chunk_m)
        return [(start, min(self.chunk_m, self.own_m - start)) for start in starts]

    @property
    def staging_pitch(self) -> int:
        """Bytes from a token to the next of the staging buffer, in fp32."""
        return (TILE_N + STAGING_PAD) * 4

    @property
    def staging_bytes(self) -> int:
        """Staging buffer of a warpgroup."""
        size = self.chunk_m * self.staging_pitch
        return -(-size // TMA_TILE_ALIGNMENT) * TMA_TILE_ALIGNMENT if self.bulk_stores else size

    @property
    def acc_bytes(self) -> int:
        """A tile's accumulators in fp32."""
        return 4 * self.block_rows * self.tile_m

    @property
    def share_bytes(self) -> int:
        """A warpgroup's accumulators of the tokens that a CTA stores."""
        return self.acc_bytes // (self.warpgroups * self.cluster)

    @property
    def stage_copies(self) -> int:
        """Warps whose copies fill a stage: of activations and of weights."""
        return 2

    @property
    def stage_warps(self) -> int:
        """Warps that give a stage back."""
        return self.consumer_warps // self.k_warpgroups * self.multicast

    @property
    def num_barriers(self) -> int:
        """Of full and of empty stages, and of parts of K that other CTAs send."""
        return 2 * self.num_stages + self.partial_slots

    @property
    def smem_bytes(self) -> int:
        stages = self.num_stages * self.stage_bytes
        acc = self.warpgroups * self.staging_bytes + self.partials_bytes
        return stages + acc + self.num_barriers * BARRIER_BYTES

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        weight = self.format.symbol_name(self.dtype)
        parts = f"p{self.row_parts}" if self.row_parts > 1 else ""
        shape = f"m{self.tile_m}{parts}n{TILE_N * self.n_tiles}x{self.warpgroups}k{self.block_k}"
        split = "_split" if self.splits_k else "_rows" if self.cuts_rows else ""
        if self.cluster > 1:
            interleaved = f"k{self.k_warpgroups}" if self.k_warpgroups > 1 else ""
            split = f"_{'dsmem' if self.dsmem_reduction else 'cluster'}{self.cluster}{interleaved}"
        split += f"_multicast{self.multicast}" if self.multicast > 1 else ""
        split += "_tmastore" if self.bulk_stores else ""
        groups = f"s{self.group_steps}{'mmasync' if self.synchronous else 'limbs' if self.limbs else ''}"
        groups += "ahead" if self.ahead else ""
        groups += f"f{self.in_flight}" if self.in_flight > 1 else ""
        stages = f"r{self.num_stages}" + (f"c{self.chunk}" if self.chunk != CHUNK_M else "")
        return f"linear_wgmma_{weight}_{shape}_{groups}{stages}{split}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        choices = {
            "dtype": self.format.dtypes,
            "tile_m": TILE_M_SIZES,
            "row_parts": tuple(range(1, 9)),
            "n_tiles": (1, 2),
            "warpgroups": tuple(SYNCHRONOUS_REGISTERS if self.synchronous else CONSUMER_REGISTERS),
            "block_k": (64, 128),
            "group_steps": (1, 2, 4),
            "in_flight": (1, 2, 3),
            "chunk": (32, 64),
            "cluster": DSMEM_CLUSTERS if self.dsmem_reduction else CLUSTERS,
            "k_warpgroups": K_WARPGROUPS,
            "multicast": MULTICASTS,
        }
        for field, wanted in choices.items():
            found = getattr(self, field)
            if found not in wanted:
                return f"{field} {found!r} is not one of {', '.join(map(str, wanted))}"
        if self.group_size and self.block_k % self.group_size and self.group_size % self.block_k:
            return f"unit_k {self.block_k} and group_size {self.group_size} do not divide one another"
        if self.k_block_steps % (2 * self.group_steps):
            # Operands take turns in two sets of registers, and each k block begins with the first.
            return f"unit_k {self.block_k} is not an even number of {self.group_steps} steps of {STEP_K}"
        if self.in_flight * self.group_steps >= self.k_block_steps:
            # The stage before is given back when no group of its k block runs any more, within this one.
            return f"{self.in_flight} groups of {self.group_steps} steps are not less than unit_k {self.block_k}"
        if self.tile_m % self.row_parts or (self.row_parts > 1 and self.part_m.bit_count() > 1):
            return f"{self.row_parts} parts of {self.tile_m} tokens are not a power of two each"
        if self.part_m < WGMMA_N_STEP:
            return f"{self.row_parts} parts of {self.tile_m} tokens have less than the {WGMMA_N_STEP} of an MMA"
        if self.tile_m * self.n_tiles > 256:
            return f"{self.tile_m} tokens of {self.n_tiles} tiles are more accumulators than a thread has registers for"
        if problem := self.cluster_problem():
            return problem
        if problem := self.tile_problem():
            return problem
        if self.synchronous and self.tile_m * self.warpgroups > SYNCHRONOUS_TILE_M:
            most = SYNCHRONOUS_TILE_M // self.warpgroups
            return f"{self.tile_m} tokens are more than the {most} of {self.warpgroups} synchronous warpgroups"
        if self.limbs and not (self.format.takes_limbs and self.block_k == LIMB_GROUP):
            return f"limbs want 4-bit integers without zero points and k blocks of {LIMB_GROUP} inputs"
        if self.limbs and (self.group_size < LIMB_GROUP or self.synchronous):
            return f"limbs want groups of at least {LIMB_GROUP} inputs and MMAs of warpgroups"
        if self.limbs and self.row_parts > MOST_LOOPS:
            return f"{self.row_parts} parts of rows whose limbs follow one another want a loop for each"
        if self.limbs and self.tile_m > LIMB_TILE_M:
            return f"{self.tile_m} tokens are more than the {LIMB_TILE_M} whose limbs an MMA takes"
        if self.ahead and (not self.limbs or self.tile_m > AHEAD_TILE_M):
            return f"a k block is decoded ahead of products of limbs, of at most {AHEAD_TILE_M} tokens"
        if self.num_stages < 2:
            return f"num_stages {self.num_stages} is not at least 2"
        if self.smem_bytes > MAX_SHARED_BYTES:
            return f"{self.smem_bytes} bytes of shared memory exceed the {MAX_SHARED_BYTES} of an SM"
        return None

    def tile_problem(self) -> str | None:
        """Why tiles cannot be shared, cut along rows, or stored as the configuration says, or None."""
        plain = not (self.synchronous or self.limbs) and self.cluster == 1
        if self.multicast > 1 and (self.cluster > 1 or (self.row_parts > 1 and not self.cuts_rows)):
            return (
                f"{self.multicast} CTAs that multicast activations want tiles that no cluster cuts and rows in one part"
            )
        if self.multicast > 1 and not plain:
            return f"{self.multicast} CTAs multicast activations only for MMAs of warpgroups, not in limbs"
        if self.cuts_rows and (self.row_parts == 1 or self.splits_k or not plain):
            return (
                f"tiles are cut along rows into more than {self.row_parts} part, not along K, not in limbs or clusters"
            )
        if self.bulk_stores and not (plain and self.own_m % (STORE_BUFFERS * STORE_M) == 0):
            return f"TMA stores {STORE_BUFFERS * STORE_M} tokens at a time, not of limbs or clusters"
        if self.bulk_stores and self.staging_bytes < STORE_BUFFERS * STORE_BYTES:
            return f"{self.staging_bytes} bytes of staging are less than {STORE_BUFFERS} TMA tiles of {STORE_BYTES}"
        return None

    def cluster_problem(self) -> str | None:
        """Why CTAs of a cluster cannot exchange accumulators as the configuration says, or None."""
        if self.k_warpgroups > 1 and (self.limbs or not self.dsmem_reduction):
            return f"{self.k_warpgroups} warpgroups interleave k blocks with a DSMEM reduction, not of staged limbs"
        if self.cluster == 1:
            return "a DSMEM reduction wants a cluster of at least 2" if self.dsmem_reduction else None
        if self.synchronous:
            return f"synchronous warpgroups do not exchange accumulators in a cluster of {self.cluster}"
        if self.dsmem_reduction:
            return self.k_warpgroups_problem()
        if self.limbs:
            return f"products in limbs of a cluster of {self.cluster} reduce in the cluster (DSMEM)"
        if self.n_tiles > 1 or self.own_m < 2 * WGMMA_N_STEP or self.row_parts > 1:
            return f"a cluster of {self.cluster} wants one tile a warpgroup and {2 * WGMMA_N_STEP} tokens for each CTA"
        if self.acc_bytes > self.num_stages * self.x_stage_bytes:
            return f"accumulators of {self.acc_bytes} bytes do not fit into the stages of activations"
        return None

    def k_warpgroups_problem(self) -> str | None:
        """Why warpgroups cannot take k blocks in turn as the configuration says, or None."""
        if self.warpgroups % self.k_warpgroups:
            return f"{self.warpgroups} warpgroups are no multiple of {self.k_warpgroups} turns"
        if self.num_stages < 2 * self.k_warpgroups or self.num_stages % self.k_warpgroups:
            # By its parity a use of a stage would be taken for the next but one; and a warpgroup has two at once.
            return (
                f"num_stages {self.num_stages} is no multiple of {self.k_warpgroups} turns, or less than two for each"
            )
        return None


@dataclass(frozen=True)
class LimbRowsConfig:
    """The kernel that makes limbs of rows of x.

    Attributes:
        dtype: of x, "bf16" or "fp16".
    """

    dtype: str = "bf16"

    @property
    def num_threads(self) -> int:
        return LIMB_ROWS_THREADS

    @property
    def name(self) -> str:
        return f"linear_limbs_{self.dtype}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        return None if self.dtype in DTYPES else f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}"


@dataclass(frozen=True)
class LimbBlocksConfig(LimbRowsConfig):
    """The kernel that makes limbs of rows of x in blocks, for dense products of few rows."""

    @property
    def name(self) -> str:
        return f"linear_limb_blocks_{self.dtype}"
