"""Every compile-time choice of the weight-only GEMM for many rows, as data. No GPU types here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

from cute_kernels.linear.config import GROUP_SIZES, SCALE_BYTES, ZERO_BYTES
from cute_kernels.sm90 import BARRIER_BYTES, MAX_SHARED_BYTES, WARP_THREADS
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N, tile_k

WARPGROUP_WARPS = 4
WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS
BOX_K = 64  # inputs of a box of activations: rows of 128 bytes, what swizzling permutes
BOX_ALIGNMENT = 1024
TOKENS = (8, *range(16, 257, 16))  # an MMA has whole eights, and stmatrix turns two of them around
DTYPES = ("bf16", "fp16")
CLUSTERS = (1, 2)
PUSH_CLUSTERS = (2, 3)  # of those that push their sums; clusters of more do not all run at once, one for each SM
TURNS = (1, 2, 3, 4)
SHARINGS = (1, 2)
MOST_LOOPS = 4  # of more ptxas puts the MMAs one after the other
TOKEN_BAND = 8  # token tiles that are computed side by side, see `tiles.Items`
CHUNK_TOKENS = 64  # tokens that a warpgroup stores at a time, if nothing else is said
STORE_TOKENS = 64  # rows of x of a box of results,
STORE_BYTES = STORE_TOKENS * 2 * TILE_N  # of 64 features in 16 bits
STORE_BUFFERS = 2  # of boxes: one is stored while the next is put together
MOST_COMBINED = 8  # vectors of another part of K that a thread asks for at a time
STAGING_PAD = 4  # words between the tokens of the staging buffer
MMA_TOKENS = 8  # that the fewest columns of an MMA are, and the rows among which swizzling exchanges pieces
COPY_REGISTERS = 24  # of the threads that copy
# Registers of the multiplying threads, by the number of their warpgroups: with the copying ones, all that an SM has.
MATH_REGISTERS = {1: 240, 2: 240, 3: 160}
# The same where MMAs are synchronous: the copying warps are given more, of which none is missed.
SYNCHRONOUS_REGISTERS = {2: 224, 4: 104}
SYNCHRONOUS_COPY_REGISTERS = 56
DIGIT_GROUP = 128  # inputs of a row of x that share a scale where x comes in digits: rows of a box of bytes
ROW_DIGIT_BYTES = 2 * DIGIT_GROUP  # both digits of so many inputs of a row,
ROW_SCALE_BYTES = 4  # and their scale
DIGIT_TOKENS = 64
AHEAD_TOKENS = 32  # for which a thread has registers to decode the next unit ahead
DIGIT_ROWS_THREADS = 256  # of the kernel that makes digits
X_SCALE_ALIGNMENT = 4  # scales of x among which a tile's first one may stand
SYNCHRONOUS_TOKENS = 64  # of all warpgroups: what 104 registers are enough for with four
# Units of each tile that are asked into L2 before a CTA makes its barriers, as measured for tiles that push, of up to
# PREFETCHED_TOKENS rows: by the bits of a code and the tiles of a block. See `copies.CopyingWarps.prefetch_units`.
PREFETCHED_UNITS = {(4, 1): 4, (4, 2): 3, (8, 1): 2}
PREFETCHED_TOKENS = 32


@dataclass(frozen=True)
class WgmmaConfig:
    """One compiled variant.

    A CTA computes tiles of ``block_rows`` output features by ``tokens`` rows of x, one after the other. A stage of its
    ring holds the codes, scales and activations of a *unit* of ``unit_k`` inputs.

    Attributes:
        bits: of a code, 4 or 8.
        dtype: "bf16" or "fp16", of activations and scales.
        group_size: inputs that share a scale; 0 for one scale per output feature.
        zero_point: whether each group has an integer zero point; if not, it is half the range of codes.
        tokens: rows of x of a tile, the N of the MMAs.
        row_parts: equal parts of those rows. Each comes in boxes of its own; parts behind the last row that there is
            are neither brought nor multiplied.
        m_tiles: tiles of 64 output features of a warpgroup, which multiplies them with the same activations.
        warpgroups: that multiply; each has ``m_tiles`` of its own.
        unit_k: inputs of a unit.
        group_steps: k16 steps that are decoded, then multiplied, at a time: a commit group of MMAs.
        in_flight: commit groups that run while the next one is decoded.
        num_stages: stages of the ring.
        chunk: rows of x that a warpgroup stores at a time, at most; fewer leave room for another stage.
        splits_k: whether K may be cut into parts.
        cluster: CTAs of a cluster. They have equal parts of K of one tile, exchange their sums through shared memory,
            and each stores its share of the tile's rows of x; each CTA has one item. 1: no cluster.
        pushes: whether the CTAs of a cluster share out whole tiles of 64 output features, and each sends its parts of
            the others' to them; for few rows. See `.cluster_parts`.
        turns: warpgroups that take the units of one tile in turn, where parts of K are pushed: each has a part of its
            own, so one decodes while another waits for its MMAs.
        sharing: CTAs of a cluster that compute tiles of the same rows of x, of output features next to each other. Each
            brings its share of the activations into the memory of all of them. 1: each CTA brings its own.
        cuts_rows: whether the tiles of a last round are cut into the parts of their rows of x, instead of along K.
        bulk_stores: whether results leave by TMA, where they are plain and in 16 bits. See `.box_stores`.
        synchronous: whether warps multiply by mma.sync, each for itself, and scale sums; for few rows.
        digits: whether x comes as two digits of 8 bits and a scale for each row and `DIGIT_GROUP` inputs, and products
            are those of bytes, exact in int32; for few rows. See `cute_kernels.linear.wgmma.digits`.
        ahead: whether, of digits, the next unit is decoded while this one is multiplied. See `.digits_ahead`.
    """

    bits: int
    dtype: str
    group_size: int
    zero_point: bool = False
    tokens: int = 256
    row_parts: int = 1
    m_tiles: int = 1
    warpgroups: int = 2
    unit_k: int = 64
    group_steps: int = 2
    in_flight: int = 1
    num_stages: int = 5
    chunk: int = CHUNK_TOKENS
    splits_k: bool = False
    cluster: int = 1
    pushes: bool = False
    turns: int = 1
    sharing: int = 1
    cuts_rows: bool = False
    bulk_stores: bool = False
    synchronous: bool = False
    digits: bool = False
    ahead: bool = False

    @property
    def scales_codes(self) -> bool:
        """Whether codes are scaled by the instruction that decodes them: `cute_kernels.linear.decode.SubnormalDecoder`.

        If not, scales meet weights in a product of their own, or the sums of a group.
        """
        return self.dtype == "bf16" and not (self.synchronous or self.digits)

    @property
    def makes_digits_before(self) -> bool:
        """Whether a launch of its own makes digits of x."""
        return self.digits

    @property
    def tile_k(self) -> int:
        """Inputs of a tile of codes."""
        return tile_k(self.bits)

    @property
    def block_tiles(self) -> int:
        """Tiles of 64 output features of a CTA."""
        return self.m_tiles * self.warpgroups // self.turns

    @property
    def last_tiles(self) -> int:
        """Tiles of 64 output features of a CTA's last warpgroup."""
        return self.m_tiles

    @property
    def block_rows(self) -> int:
        """Output features of a CTA's tile."""
        return TILE_N * self.block_tiles

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster, whatever they do together."""
        return self.cluster * self.sharing

    @property
    def one_token_tile(self) -> bool:
        """Whether no dense product has rows of more than one tile: of those that are pushed, or come in digits."""
        return self.pushes or self.digits

    @property
    def prefetched_units(self) -> int:
        """Units of each of a block's tiles whose codes are asked into L2 before the CTA makes its barriers."""
        if not self.pushes or self.digits or self.tokens > PREFETCHED_TOKENS:
            return 0
        return PREFETCHED_UNITS.get((self.bits, self.block_tiles), 0)

    @property
    def math_warps(self) -> int:
        return WARPGROUP_WARPS * self.warpgroups

    @property
    def epilogue_warps(self) -> int:
        """Warps that store results together: those of a warpgroup."""
        return WARPGROUP_WARPS

    @property
    def num_threads(self) -> int:
        """Multiplying warpgroups, and one of copying warps: registers are given to whole warpgroups."""
        return (self.warpgroups + 1) * WARPGROUP_THREADS

    @property
    def math_registers(self) -> int:
        """Of a multiplying thread."""
        return (SYNCHRONOUS_REGISTERS if self.synchronous else MATH_REGISTERS)[self.warpgroups]

    @property
    def copy_registers(self) -> int:
        """Of a thread that copies."""
        return SYNCHRONOUS_COPY_REGISTERS if self.synchronous else COPY_REGISTERS

    @property
    def thread_sums(self) -> int:
        """fp32 sums of a thread."""
        return self.m_tiles * self.tokens // 2

    @property
    def thread_vectors(self) -> int:
        """Of four sums of a thread."""
        return self.thread_sums // 4

    @property
    def combine_batch(self) -> int:
        """Vectors of another part of K that a thread asks for at a time: all of them are in one batch, none beside."""
        return gcd(MOST_COMBINED, self.thread_vectors)

    @property
    def own_tokens(self) -> int:
        """Rows of x of a tile that a CTA stores."""
        return self.tokens // (1 if self.pushes else self.cluster)

    @property
    def part_slots(self) -> int:
        """Tiles of 64 output features whose parts of K a CTA of a cluster is sent, at most."""
        return -(-self.block_tiles // self.cluster) if self.pushes else 0

    @property
    def part_bytes(self) -> int:
        """A tile of 64 output features' sums of a part of K in fp32."""
        return 4 * TILE_N * self.tokens

    @property
    def sent_bytes(self) -> int:
        """Shared memory for what a CTA is sent by the others of its cluster."""
        return self.part_slots * (self.cluster - 1) * self.part_bytes

    @property
    def parts_bytes(self) -> int:
        """Shared memory for the parts of K of a cluster's tiles: those that are sent, and those of other turns."""
        return self.sent_bytes + self.block_tiles * (self.turns - 1) * self.part_bytes

    @property
    def unit_steps(self) -> int:
        return self.unit_k // STEP_K

    @property
    def unit_tiles(self) -> int:
        return self.unit_k // self.tile_k

    @property
    def unit_groups(self) -> int:
        """Groups that a unit has a part of; 0 where scales are per output feature."""
        return -(-self.unit_k // self.group_size) if self.group_size else 0

    @property
    def part_tokens(self) -> int:
        """Rows of x of a box."""
        return self.tokens // self.row_parts

    @property
    def loop_parts(self) -> tuple[int, ...]:
        """Numbers of parts for which there is a loop of its own; fewer are multiplied as if they were as many."""
        parts = range(1, self.row_parts + 1)
        if self.row_parts <= MOST_LOOPS:
            return tuple(parts)
        return tuple(count for count in parts if count % 2 == 0 or count > self.row_parts - 2)

    def loop_tokens(self, present: int) -> int:
        """Rows of x that are multiplied where ``present`` parts have some."""
        return self.part_tokens * next(count for count in self.loop_parts if count >= present)

    @property
    def box_bytes(self) -> int:
        """A tile's activations of BOX_K inputs."""
        return 2 * BOX_K * self.tokens

    @property
    def x_stage_bytes(self) -> int:
        return self.unit_k // BOX_K * self.box_bytes

    @property
    def x_scale_stage_bytes(self) -> int:
        """Scales of a tile's rows of x in fp32, from a multiple of 16 bytes on."""
        return ROW_SCALE_BYTES * (self.tokens + X_SCALE_ALIGNMENT) if self.digits else 0

    @property
    def x_scale_bytes(self) -> int:
        """Shared memory for scales of rows of x."""
        return self.num_stages * self.x_scale_stage_bytes

    @property
    def code_stage_bytes(self) -> int:
        return self.block_tiles * self.unit_tiles * TILE_BYTES

    @property
    def scale_stage_bytes(self) -> int:
        return self.block_tiles * self.unit_groups * SCALE_BYTES

    @property
    def zero_stage_bytes(self) -> int:
        return self.block_tiles * self.unit_groups * ZERO_BYTES if self.zero_point else 0

    @property
    def weight_stage_bytes(self) -> int:
        """Codes, scales and zero points of a stage."""
        return self.code_stage_bytes + self.scale_stage_bytes + self.zero_stage_bytes

    @property
    def stage_bytes(self) -> int:
        return self.x_stage_bytes + self.x_scale_stage_bytes + self.weight_stage_bytes

    @property
    def chunk_tokens(self) -> int:
        """Tokens that a warpgroup stores at a time, at most."""
        return min(self.chunk, self.own_tokens)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(first token, tokens) of what a warpgroup stores at a time, of a tile's."""
        starts = range(0, self.own_tokens, self.chunk_tokens)
        return [(start, min(self.chunk_tokens, self.own_tokens - start)) for start in starts]

    @property
    def staging_pitch(self) -> int:
        """Bytes from a token to the next of the staging buffer, in fp32."""
        return (TILE_N + STAGING_PAD) * 4

    @property
    def staging_bytes(self) -> int:
        """Staging buffer of a warpgroup."""
        size = self.chunk_tokens * self.staging_pitch
        return -(-size // BOX_ALIGNMENT) * BOX_ALIGNMENT if self.bulk_stores else size

    @property
    def sum_bytes(self) -> int:
        """A tile's sums in fp32."""
        return 4 * self.block_rows * self.tokens

    @property
    def share_bytes(self) -> int:
        """A warpgroup's sums of the tokens that a CTA stores."""
        return self.sum_bytes // (self.warpgroups * self.cluster)

    @property
    def stage_copies(self) -> int:
        """Warps whose copies fill a stage: of activations and of weights."""
        return 2

    @property
    def stage_warps(self) -> int:
        """Warps that give a stage back."""
        return self.math_warps // self.turns * self.sharing

    @property
    def num_barriers(self) -> int:
        """Of full and of empty stages, and of parts of K that other CTAs send."""
        return 2 * self.num_stages + self.part_slots

    @property
    def smem_bytes(self) -> int:
        ring = self.num_stages * self.stage_bytes
        sums = self.warpgroups * self.staging_bytes + self.parts_bytes
        return ring + sums + self.num_barriers * BARRIER_BYTES

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        weight = f"w{self.bits}{self.dtype}_g{self.group_size or 'channel'}{'z' if self.zero_point else ''}"
        parts = f"p{self.row_parts}" if self.row_parts > 1 else ""
        shape = f"m{self.tokens}{parts}n{TILE_N * self.m_tiles}x{self.warpgroups}k{self.unit_k}"
        split = "_split" if self.splits_k else "_rows" if self.cuts_rows else ""
        if self.cluster > 1:
            split = f"_{'push' if self.pushes else 'cluster'}{self.cluster}{f't{self.turns}' if self.turns > 1 else ''}"
        split += f"_share{self.sharing}" if self.sharing > 1 else ""
        split += "_bulk" if self.bulk_stores else ""
        groups = f"s{self.group_steps}{'sync' if self.synchronous else 'digits' if self.digits else ''}"
        groups += "ahead" if self.ahead else ""
        groups += f"f{self.in_flight}" if self.in_flight > 1 else ""
        ring = f"r{self.num_stages}" + (f"c{self.chunk}" if self.chunk != CHUNK_TOKENS else "")
        return f"linear_wgmma_{weight}_{shape}_{groups}{ring}{split}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        choices = {
            "bits": (4, 8),
            "dtype": DTYPES,
            "group_size": GROUP_SIZES,
            "tokens": TOKENS,
            "row_parts": tuple(range(1, 9)),
            "m_tiles": (1, 2),
            "warpgroups": tuple(SYNCHRONOUS_REGISTERS if self.synchronous else MATH_REGISTERS),
            "unit_k": (64, 128),
            "group_steps": (1, 2, 4),
            "in_flight": (1, 2, 3),
            "chunk": (32, 64),
            "cluster": PUSH_CLUSTERS if self.pushes else CLUSTERS,
            "turns": TURNS,
            "sharing": SHARINGS,
        }
        for field, wanted in choices.items():
            found = getattr(self, field)
            if found not in wanted:
                return f"{field} {found!r} is not one of {', '.join(map(str, wanted))}"
        if self.group_size and self.unit_k % self.group_size and self.group_size % self.unit_k:
            return f"unit_k {self.unit_k} and group_size {self.group_size} do not divide one another"
        if self.unit_steps % (2 * self.group_steps):
            # Operands take turns in two sets of registers, and each unit begins with the first.
            return f"unit_k {self.unit_k} is not an even number of {self.group_steps} steps of {STEP_K}"
        if self.in_flight * self.group_steps >= self.unit_steps:
            # The stage before is given back when no group of its unit runs any more, within this one.
            return f"{self.in_flight} groups of {self.group_steps} steps are not less than unit_k {self.unit_k}"
        if self.tokens % self.row_parts or (self.row_parts > 1 and self.part_tokens.bit_count() > 1):
            return f"{self.row_parts} parts of {self.tokens} tokens are not a power of two each"
        if self.part_tokens < MMA_TOKENS:
            return f"{self.row_parts} parts of {self.tokens} tokens have less than the {MMA_TOKENS} of an MMA"
        if self.tokens * self.m_tiles > 256:
            return f"{self.tokens} tokens of {self.m_tiles} tiles are more sums than a thread has registers for"
        if problem := self.cluster_problem():
            return problem
        if problem := self.tile_problem():
            return problem
        if self.synchronous and self.tokens * self.warpgroups > SYNCHRONOUS_TOKENS:
            most = SYNCHRONOUS_TOKENS // self.warpgroups
            return f"{self.tokens} tokens are more than the {most} of {self.warpgroups} synchronous warpgroups"
        if self.digits and (self.bits != 4 or self.zero_point or self.unit_k != DIGIT_GROUP):
            return f"digits want 4 bits without zero points and units of {DIGIT_GROUP} inputs"
        if self.digits and (self.group_size < DIGIT_GROUP or self.synchronous):
            return f"digits want groups of at least {DIGIT_GROUP} inputs and MMAs of warpgroups"
        if self.digits and self.row_parts > MOST_LOOPS:
            return f"{self.row_parts} parts of rows whose digits follow one another want a loop for each"
        if self.digits and self.tokens > DIGIT_TOKENS:
            return f"{self.tokens} tokens are more than the {DIGIT_TOKENS} whose digits an MMA takes"
        if self.ahead and (not self.digits or self.tokens > AHEAD_TOKENS):
            return f"a unit is decoded ahead of products of digits, of at most {AHEAD_TOKENS} tokens"
        if self.num_stages < 2:
            return f"num_stages {self.num_stages} is not at least 2"
        if self.smem_bytes > MAX_SHARED_BYTES:
            return f"{self.smem_bytes} bytes of shared memory exceed the {MAX_SHARED_BYTES} of an SM"
        return None

    def tile_problem(self) -> str | None:
        """Why tiles cannot be shared, cut along rows, or stored as the configuration says, or None."""
        plain = not (self.synchronous or self.digits) and self.cluster == 1
        if self.sharing > 1 and (self.cluster > 1 or (self.row_parts > 1 and not self.cuts_rows)):
            return f"{self.sharing} CTAs that share activations want tiles that no cluster cuts and rows in one part"
        if self.sharing > 1 and not plain:
            return f"{self.sharing} CTAs share activations only for MMAs of warpgroups, not in digits"
        if self.cuts_rows and (self.row_parts == 1 or self.splits_k or not plain):
            return (
                f"tiles are cut along rows into more than {self.row_parts} part, not along K, not in digits or clusters"
            )
        if self.bulk_stores and not (plain and self.own_tokens % (STORE_BUFFERS * STORE_TOKENS) == 0):
            return f"TMA stores {STORE_BUFFERS * STORE_TOKENS} tokens at a time, not of digits or clusters"
        if self.bulk_stores and self.staging_bytes < STORE_BUFFERS * STORE_BYTES:
            return f"{self.staging_bytes} bytes of staging are less than {STORE_BUFFERS} boxes of {STORE_BYTES}"
        return None

    def cluster_problem(self) -> str | None:
        """Why CTAs of a cluster cannot exchange sums as the configuration says, or None."""
        if self.turns > 1 and (self.digits or not self.pushes):
            return f"{self.turns} warpgroups take units in turn where parts of K are pushed, not in digits of a ring"
        if self.cluster == 1:
            return "CTAs push parts in a cluster of at least 2" if self.pushes else None
        if self.synchronous:
            return f"synchronous warpgroups do not exchange sums in a cluster of {self.cluster}"
        if self.pushes:
            return self.turns_problem()
        if self.digits:
            return f"products in digits of a cluster of {self.cluster} push their parts"
        if self.m_tiles > 1 or self.own_tokens < 2 * MMA_TOKENS or self.row_parts > 1:
            return f"a cluster of {self.cluster} wants one tile a warpgroup and {2 * MMA_TOKENS} tokens for each CTA"
        if self.sum_bytes > self.num_stages * self.x_stage_bytes:
            return f"sums of {self.sum_bytes} bytes do not fit into the ring of activations"
        return None

    def turns_problem(self) -> str | None:
        """Why warpgroups cannot take units in turn as the configuration says, or None."""
        if self.warpgroups % self.turns:
            return f"{self.warpgroups} warpgroups are no multiple of {self.turns} turns"
        if self.num_stages < 2 * self.turns or self.num_stages % self.turns:
            # By its parity a use of a stage would be taken for the next but one; and a warpgroup has two at once.
            return f"num_stages {self.num_stages} is no multiple of {self.turns} turns, or less than two for each"
        return None


@dataclass(frozen=True)
class DigitRowsConfig:
    """The kernel that makes digits of rows of x.

    Attributes:
        dtype: of x, "bf16" or "fp16".
    """

    dtype: str = "bf16"

    @property
    def num_threads(self) -> int:
        return DIGIT_ROWS_THREADS

    @property
    def name(self) -> str:
        return f"linear_digits_{self.dtype}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        return None if self.dtype in DTYPES else f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}"


@dataclass(frozen=True)
class DigitBlocksConfig(DigitRowsConfig):
    """The kernel that makes digits of rows of x in blocks, for dense products of few rows."""

    @property
    def name(self) -> str:
        return f"linear_digit_blocks_{self.dtype}"
