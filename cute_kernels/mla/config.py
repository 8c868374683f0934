"""The compile-time choices of the MLA decode kernels, and sizes derived from them. No GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.device.cuda import BARRIER_BYTES, WARP_THREADS
from cute_kernels.mla.formats import FORMATS, V_DIM, format_of
from cute_kernels.mla.layout import SLAB_COLUMNS, VALUE_SLABS, TokenLayout, layout_of
from cute_kernels.mla.policies import (
    MAINLOOPS,
    PRODUCER_WARPS,
    WHOLE,
    CooperativeTiles,
    Copies,
    Crossover,
    Decode,
    SplitCrossover,
    SplitTiles,
    Tiles,
    TmaTiles,
    WholeTiles,
)

if TYPE_CHECKING:
    from cute_kernels.device.types import Index

HEAD_DIM = 576  # columns of the wider keys
V_HEAD_DIM = V_DIM  # columns of a value: the first ones of the key
BLOCK_HEADS = 64  # rows of a CTA: M of a warpgroup's MMA
BLOCK_TOKENS = 64
GROUP_TOKENS = 8  # that a producer warp fetches at a time: rows of a swizzle atom
WARPGROUP_WARPS = 4
CONSUMER_WARPS = 2 * WARPGROUP_WARPS  # scores and left half of the output; right half
CONSUMER_THREADS = CONSUMER_WARPS * WARP_THREADS
NUM_STAGES = 2
WEIGHT_BYTES = BLOCK_HEADS * BLOCK_TOKENS * 2
ROW_VALUE_BYTES = BLOCK_HEADS * 4  # of a number a row
# What a warp publishes where a row is cut: a lane's 128 accumulators, maxima and totals; and what a CTA does, in words.
STATE_BYTES = WARP_THREADS * (V_HEAD_DIM // 4 + 4) * 4
STATE_WORDS, FLAG_WORDS = CONSUMER_WARPS * STATE_BYTES // 4, CONSUMER_WARPS
# What a CTA leaves where CTAs add up parts together: of a row's pieces fp16 values and four numbers each; and a
# flag for each of at most 16 readers.
PIECE_COLUMNS = 128
PART_ROW_BYTES = PIECE_COLUMNS * 2 + 16
PART_WORDS, PART_FLAGS = BLOCK_HEADS * (V_HEAD_DIM // PIECE_COLUMNS) * PART_ROW_BYTES // 4, 16
COOPERATIVE_PARTS = range(4, 33)  # how many parts that may be: not more readers than CTAs, a lane each
FLAG_BYTES = BLOCK_TOKENS // GROUP_TOKENS * 4  # a word of 8 bits for every 8 tokens of a block
LAUNCH_REGISTERS = {4: 168, 8: 128}  # a thread, by producer warps; in the end a CTA has at most as many in sum
HELD_STEPS, CROSSOVER_HELD_STEPS = 5, {"mla_fp8": 8, "mla_model1": 5}  # with one more, ptxas spills
TOKENS = ("sparse", "paged")
SCALES = {"mla_fp8": ("fp32", "power_of_2"), "mla_model1": ("ue8m0", "power_of_2")}
# A word for each of a block's tokens that says where it lies, and one for each 8 of them, a producer warp's mark.
ENTRY_BLOCK_BYTES = (BLOCK_TOKENS + BLOCK_TOKENS // GROUP_TOKENS) * 4
MAX_PARTS = 64  # of a row
SERVED_PREFETCH = 2  # blocks, of chosen tokens
CROSSOVER_CHUNK = 3
# Where a CTA decodes all tokens of a block: what is not the default of `SERVED_CHUNK`. Whole contexts of 656-byte
# tokens: with chunks of 5, ptxas keeps two words in local memory.
SERVED_CHUNK = 5
SERVED_DECODE: dict[tuple[str, str], dict[str, Any]] = {
    ("sparse", "mla_fp8"): {"chunk": 2, "fence": "reader"},
    ("paged", "mla_fp8"): {"chunk": 4},
}


@dataclass(frozen=True)
class PartialForm:
    """The form in which a part of a row is stored for the kernel that adds up the parts.

    Attributes:
        value_bytes: number of bytes of a value: 4 for fp32, 2 for fp16. fp16 values are scaled so that the largest
            magnitude of half a row is between 2**14 and 2**15.
        stats_bytes: number of bytes of a row's fp32 statistics: its maximum (as an exponent of 2) and its sum of
            weights. With fp16 values, also two powers of 2, by which the combine multiplies the two halves of the row.
    """

    value_bytes: int
    stats_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values, without its statistics."""
        return V_HEAD_DIM * self.value_bytes


PARTIALS = {"fp32": PartialForm(4, 8), "fp16": PartialForm(2, 16)}
SCALED_PARTIALS = "fp16"


@dataclass(frozen=True)
class MlaConfig:
    """One variant of MLA decode.

    Attributes:
        tokens: "sparse": queries see the tokens that indices name. "paged": queries see the first tokens of their
            request, which its block table lists.
        form: name of the cache's format.
        head_dim: number of columns of a key, one of the format's.
        tiles: how tiles are filled and multiplied, and partial results combined: see :mod:`.policies`. With crossover a
            row must have an even number of blocks of 64 heads.
    """

    limits: ClassVar[Limits] = HOPPER
    tokens: str = "sparse"
    form: str = "mla_fp8"
    head_dim: int = HEAD_DIM
    tiles: Tiles = WholeTiles(Decode())  # noqa: RUF009 (frozen)

    @property
    def name(self) -> str:
        """C identifier of the variant."""
        load, tiles = self.tiles.load, self.tiles
        fp8 = f"_{load.scales}_{load.fence}" if load.fp8 else ""
        width = f"_d{self.head_dim}" if not load.fp8 and self.head_dim != HEAD_DIM else ""
        crossover = "_crossover" * load.pair
        ahead = f"_prefetch{load.prefetch}" if load.prefetch else ""
        chunk = f"_chunk{load.chunk}" if load.fp8 and load.chunk < WHOLE else ""
        warps = f"_warps{load.warps}" if load.warps != PRODUCER_WARPS[0] else ""
        mainloop = f"_{tiles.mainloop}" if tiles.mainloop != MAINLOOPS[0] else ""
        order = mainloop + "_eager" * tiles.eager + "_cooperative" * tiles.cooperative
        return f"{self.form}{width}_{self.tokens}{fp8}{crossover}{ahead}{chunk}{warps}{order}"

    # -- what device code asks of the policies -------------------------------------------------------------------------

    @property
    def crossover(self) -> bool:
        """Whether two CTAs with different heads of a row each load half of the row's tokens."""
        return self.tiles.load.pair

    @property
    def producer_warps(self) -> int:
        return self.tiles.load.warps

    @property
    def cooperative(self) -> bool:
        return self.tiles.cooperative

    @property
    def layout(self) -> TokenLayout:
        """The layout of a token: which bytes of the token become which columns of a tile."""
        return layout_of(self.form, self.head_dim)

    @property
    def partials(self) -> str:
        """The key in `PARTIALS` of the form in which a part of a row is stored. fp16 saves time: writing and reading 64
        heads in fp32 takes as long as processing two blocks. fp32 is needed if one half of the output has both scaled
        codes and RoPE columns, since one power of 2 cannot fit both.
        """
        scaled_in_part = 0 < self.layout.code_slabs < VALUE_SLABS
        return "fp32" if scaled_in_part else SCALED_PARTIALS

    @property
    def cluster(self) -> int:
        """The number of CTAs that share the decoding of a row's tokens."""
        return 2 if self.crossover else 1

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return (CONSUMER_WARPS + self.producer_warps) * WARP_THREADS

    @property
    def value_columns(self) -> int:
        """The N of an MMA of weights and values. With eight producer warps a thread begins with 128 registers. ptxas
        then refuses an MMA with 128 accumulators a thread, so N is halved.
        """
        return V_HEAD_DIM // 2 if self.producer_warps == PRODUCER_WARPS[0] else V_HEAD_DIM // 4

    @property
    def warp_groups(self) -> int:
        """The number of groups of 8 tokens that a producer warp loads in each block."""
        return BLOCK_TOKENS // GROUP_TOKENS // self.producer_warps // self.cluster

    @property
    def tma_tiles(self) -> bool:
        """Whether TMA loads the tiles."""
        return isinstance(self.tiles.load, TmaTiles)

    @property
    def delays_pv(self) -> bool:
        """Whether the right half of P V is computed a block later than the left half."""
        return isinstance(self.tiles, SplitTiles)

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The slabs of each part of a tile. Each part is filled and released separately."""
        return self.layout.parts if self.delays_pv else (tuple(range(self.layout.num_slabs)),)

    @property
    def tile_parts(self) -> int:
        """The number of parts of a tile. Each part is filled and released separately."""
        return 2 if self.delays_pv else 1

    def part_number(self, stage: Index, part: int) -> Index:
        """Returns the index of the barriers of a part of the tile in a stage."""
        return stage if self.tile_parts == 1 else self.tile_parts * stage + part

    @property
    def held_steps(self) -> int:
        """Number of k16 steps of the queries that the mainloop "delayed_pv" keeps in registers."""
        return CROSSOVER_HELD_STEPS[self.form] if self.crossover and not self.copies else HELD_STEPS

    @property
    def empty_arrivals(self) -> int:
        """The number of arrivals that release a tile, or a part of one."""
        return CONSUMER_WARPS // self.tile_parts * self.cluster

    def sent_bytes(self, part: int) -> int:
        """Returns how many bytes of part ``part`` of a tile one CTA of a pair receives from the other CTA: half of the
        part's rows, and for part 0 also half of the flags."""
        rows = len(self.parts[part]) * SLAB_COLUMNS * 2 * BLOCK_TOKENS
        return (rows + (FLAG_BYTES if part == 0 else 0)) // 2

    @property
    def copies(self) -> bool:
        """Whether tiles are copies of the cache's bytes. They are if tokens have 16 bits."""
        return not self.tiles.load.fp8

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of 64 tokens in shared memory."""
        return BLOCK_TOKENS * self.head_dim * 2

    @property
    def query_bytes(self) -> int:
        """Bytes of shared memory for the queries of 64 heads."""
        return BLOCK_HEADS * self.head_dim * 2

    @property
    def launch_registers(self) -> int:
        """Number of registers of a thread when a CTA begins."""
        return LAUNCH_REGISTERS[self.producer_warps]

    @property
    def entry_lead(self) -> int:
        """How many blocks ahead of its use a producer warp loads an entry: as far ahead as it prefetches tokens, but at
        least two blocks.
        """
        return max(self.tiles.load.prefetch, 2)

    @property
    def entry_blocks(self) -> int:
        """The number of blocks whose entries shared memory holds; a power of 2."""
        return 1 << self.entry_lead.bit_length()

    @property
    def entry_bytes(self) -> int:
        """Bytes of shared memory for entries; 0 if tokens are not decoded."""
        return 0 if self.copies else self.entry_blocks * ENTRY_BLOCK_BYTES

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        stages = NUM_STAGES * (self.tile_bytes + FLAG_BYTES + 2 * self.tile_parts * BARRIER_BYTES) + BARRIER_BYTES
        others = WEIGHT_BYTES + ROW_VALUE_BYTES + self.entry_bytes
        return stages + self.query_bytes + others

    def can_implement(self) -> str | None:
        """Returns why the configuration cannot be compiled, or None."""
        for name, wanted in {"tokens": TOKENS, "form": tuple(FORMATS)}.items():
            if getattr(self, name) not in wanted:
                return f"{name} is {getattr(self, name)!r}; want one of {wanted}"
        head_dims, load = format_of(self.form).head_dims, self.tiles.load
        if self.head_dim not in head_dims:
            return f"head_dim is {self.head_dim}; {self.form} has {head_dims}"
        scales = SCALES.get(self.form)
        if load.fp8 != (scales is not None):
            return f"load is {load.kind!r}; want one of {'16-bit' if scales is None else 'FP8'} tokens for {self.form}"
        if scales is not None and load.scales not in scales:
            return f"scales is {load.scales!r}; want one of {scales} for {self.form}"
        if isinstance(load, TmaTiles) and self.tokens != "paged":
            return f"load is {load.kind!r}; {self.tokens} tokens do not lie side by side"
        if self.tiles.cooperative and self.partials != SCALED_PARTIALS:
            return f"tiles are cooperative; want a format whose parts are {SCALED_PARTIALS}"
        return self.tiles.reason() or self.limits.refuses(self.num_threads, self.smem_bytes)


COMBINE_SLOTS = (1, 8)


@dataclass(frozen=True)
class CombineConfig:
    """The kernel that adds up the parts of split rows.

    Attributes:
        dtype: the result's dtype, "bf16" or "fp16".
        slots: number of groups of 128 threads in a CTA. 1 for many rows: an SM then holds many CTAs. 8 for few rows: an
            SM then holds one CTA, so that CTAs are spread over all SMs.
        partials: the key in `PARTIALS` of the form in which parts are stored.
    """

    dtype: str = "bf16"
    slots: int = COMBINE_SLOTS[0]
    partials: str = "fp32"

    @property
    def num_threads(self) -> int:
        """Number of threads of a CTA; each has a vector of 4 columns."""
        return self.slots * (V_HEAD_DIM // 4)

    @property
    def batch(self) -> int:
        """The number of parts that a thread loads at once."""
        return 4 if self.slots == COMBINE_SLOTS[0] else 8

    @property
    def name(self) -> str:
        """C identifier of the variant."""
        dtype = "" if self.dtype == "bf16" else f"_{self.dtype}"
        return f"mla_combine_{self.num_threads}{dtype}" + (f"_of_{self.partials}" if self.partials != "fp32" else "")


def fits_crossover(tokens: str, form: str, num_heads: int, tma_tiles: bool = False) -> bool:
    """Returns whether crossover (CTAs in pairs) supports a call. A row must have an even number of blocks of 64 heads.
    Tokens must be one of three kinds: chosen FP8 tokens, whole contexts of 656-byte tokens, or tokens that TMA loads
    (see `fits_tma_tiles`).
    """
    wanted = tma_tiles or form == "mla_fp8" or (tokens == "sparse" and form in SCALES)
    return wanted and -(-num_heads // BLOCK_HEADS) % 2 == 0


def fits_tma_tiles(tokens: str, form: str, page_size: int) -> bool:
    """Returns whether TMA can load the tokens of calls: whole contexts of 16-bit tokens, in pages of a multiple of
    64."""
    return tokens == "paged" and form not in SCALES and page_size % BLOCK_TOKENS == 0


def is_mma_bound(form: str, num_heads: int) -> bool:
    """Returns whether tensor cores limit a call's speed. They do if cached tokens have 16 bits and a row has more than
    64 heads: several CTAs then read the same tokens."""
    return form not in SCALES and num_heads > BLOCK_HEADS


def served_config(
    tokens: str,
    form: str,
    head_dim: int | None = None,
    crossover: bool = False,
    mma_bound: bool = False,
    tma_tiles: bool = False,
    eager: bool = False,
    cooperative: bool = False,
) -> MlaConfig:
    """Returns the variant for calls with these properties.

    Args:
        head_dim: None: the format's head_dim, or the wider one if it has two.
        crossover: see `fits_crossover`.
        mma_bound: see `is_mma_bound`.
        tma_tiles: see `fits_tma_tiles`.
        eager: whether work tiles are long and loads limit their speed, see `.schedule`; used only with crossover or TMA
            tiles.
        cooperative: whether the CTAs of one launch combine the parts of rows.
    """
    tiles: Tiles
    scales = SCALES[form][0] if form in SCALES else ""
    if tma_tiles:
        # As measured: pairs gain by prefetching, CTAs by themselves lose.
        tiles = SplitTiles(TmaTiles(crossover, int(crossover), eager))
    elif form not in SCALES:
        tiles = WholeTiles(Copies(), MAINLOOPS[mma_bound])
    elif crossover and eager:
        tiles = SplitTiles(SplitCrossover(scales))
    elif crossover:
        load = Crossover(scales, chunk=CROSSOVER_CHUNK)
        tiles = CooperativeTiles(load) if cooperative else WholeTiles(load, "stepped")
    else:
        # As measured: chosen tokens of FP8 gain by prefetching, but not where two CTAs share them, and registers have
        # those of a whole block; whole contexts lose half of their rate by it. Two producer warps on a scheduler gain
        # where one CTA decodes all tokens of a block.
        options: dict[str, Any] = {"chunk": SERVED_CHUNK, **SERVED_DECODE.get((tokens, form), {})}
        prefetch = SERVED_PREFETCH if tokens == "sparse" else 0
        tiles = WholeTiles(Decode(scales, prefetch=prefetch, warps=PRODUCER_WARPS[1], **options))
    return MlaConfig(tokens, form, head_dim or format_of(form).head_dims[0], tiles)


SHIPPED: tuple[tuple[Any, ...], ...] = (
    *((tokens, form, None) for tokens in TOKENS for form in ("mla_fp8", "mla_model1", "mla_bf16")),
    *(("sparse", form, None, True, False, False, eager) for form in SCALES for eager in (False, True)),
    ("sparse", "mla_fp8", None, True, False, False, False, True),  # together
    ("paged", "mla_fp8", None, True, False, False, True),
    ("sparse", "mla_bf16", 512),
    *(("sparse", "mla_bf16", head_dim, False, True) for head_dim in (576, 512)),
    ("paged", "mla_fp16", None),
    *(("paged", form, None, False, True) for form in ("mla_bf16", "mla_fp16")),
    *(("paged", form, None, pairs, False, True) for form in ("mla_bf16", "mla_fp16") for pairs in (False, True)),
    *(("paged", form, None, False, False, True, True) for form in ("mla_bf16", "mla_fp16")),
)
"""The variants in bundles, as arguments of `served_config`; other variants are compiled when a call needs them."""
