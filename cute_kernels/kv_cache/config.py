"""The configurations of the kernels that write and read cache rows: every compile-time choice, as data. There are no
GPU types here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.kv import HEAD_DIMS, KvFormat, format_of

if TYPE_CHECKING:
    from cute_kernels.formats.kv.transforms import CacheTransform

DTYPES = ("bf16", "fp16")  # of q, k and v
BULK_THREADS = 4 * WARP_THREADS  # of a CTA of the bulk kernels
BULK_DTYPES = ("bf16", "fp16", "fp32")  # of what is quantised in bulk
ROPE_STYLES = ("none", "half", "interleaved")
LANE_ELEMENTS = 8  # columns that a lane owns of the wider operand: 16 bytes of bf16
GROUP_BITS = 20  # x // n is x * ceil(2**20 / n) >> 20 for x * n < 2**20: of a q head and a group of them
MAX_TRANSFORMED_HEADS = 1 << GROUP_BITS // 2  # of q, where KV heads are found so
NUM_WARPS = 2  # of a CTA of the append kernel
# Rows of K or V, and of q, that a team of lanes loads at a time; q heads that a team takes for each KV head of others.
ROWS_IN_FLIGHT, Q_ROWS_IN_FLIGHT, Q_ROWS_PER_KV_ROW = 2, 4, 2

# Bits of a launch's mode.
HAS_Q, HAS_SEQ_LENS, HAS_TABLE, WIDE_POSITIONS = (1 << i for i in range(4))


def team_lanes(*head_dims: int, lane_columns: int = LANE_ELEMENTS) -> int:
    """Returns the number of lanes that share a row, a power of two. Each lane has an even number of columns,
    ``lane_columns`` if possible.

    If a row has up to 8 groups (columns that share a scale), a group's columns belong to a whole number of lanes.
    """
    lanes = WARP_THREADS
    while lanes > 1 and (
        lane_columns * lanes > max(head_dims) or any(head_dim % (2 * lanes) for head_dim in head_dims)
    ):
        lanes //= 2
    return lanes


def row_alignment(kv_format: str, head_dim: int, lanes: int, runs: int = 1) -> int:
    """Returns the alignment in bytes that rows of a cache need for ``lanes`` lanes to access their parts of a row.

    The alignment is the widest access, up to 16 bytes, that fits a lane's part of the codes. Rows with header words
    before the codes need at least 4 bytes.
    """
    form = format_of(kv_format)
    header, row_bytes = form.header_bytes, form.row_bytes(head_dim)
    unit = math.gcd(16, (row_bytes - header) // lanes // runs, header, row_bytes)
    return max(unit, 4) if header else unit


def other_rotation(width: int, head_dim: int) -> str | None:
    """Returns None if lanes can rotate rows of ``head_dim`` columns in Hadamard blocks of ``width`` columns. Otherwise
    returns a text that lists the possible rotations, for a message. The number of columns of each lane must be a power
    of two.
    """
    if width < 1 or width & (width - 1) or head_dim % width:
        return f"a power of two that divides head_dim {head_dim}"
    if width > 1 and (head_dim & (head_dim - 1) or head_dim > 256):
        return f"1 with a head_dim of {head_dim}: the kernels rotate rows of 64, 128 and 256"
    return None


@dataclass(frozen=True)
class RowTransform:
    """The steps of a cache transform on rows, known at compile time.

    Attributes:
        center: whether K has a center.
        factor: whether K and q have factors.
        v_factor: whether V has factors.
        shift: whether the kernel writes q . center.
        k_rotation: number of columns of the Hadamard blocks of K and q; 1 for no rotation.
        v_rotation: number of columns of the Hadamard blocks of V; 1 for no rotation.
    """

    center: bool = False
    factor: bool = False
    v_factor: bool = False
    shift: bool = False
    k_rotation: int = 1
    v_rotation: int = 1

    @property
    def num_parts(self) -> int:
        """The largest number of arrays of constants that a row of K, of q or of V needs."""
        return max(max(self.center, self.shift) + self.factor, int(self.v_factor))

    @property
    def name(self) -> str:
        """Part of a C identifier: "center_factor_k32_v128"."""
        parts = [part for part in ("center", "factor", "v_factor", "shift") if getattr(self, part)]
        parts += [f"{of}{width}" for of, width in (("k", self.k_rotation), ("v", self.v_rotation)) if width > 1]
        return "_".join(parts)


def row_transform_of(given: CacheTransform | None, shift: bool) -> RowTransform | None:
    """Returns the steps of a cache transform on rows; None if it changes nothing. shift: whether the kernel writes the
    queries' shifts."""
    if given is None or given.identity:
        return None
    return RowTransform(
        center=given.k_center is not None,
        factor=given.k_factor is not None,
        v_factor=given.v_factor is not None,
        shift=shift,
        k_rotation=given.k_rotation,
        v_rotation=given.v_rotation,
    )


@dataclass(frozen=True)
class WrittenRows:
    """The format and size of the cache rows that are written for K or for V.

    Attributes:
        format: name of the cache format, see :mod:`cute_kernels.formats.kv`.
        head_dim: number of columns of a row: that of q and k, or that of v.
    """

    format: str
    head_dim: int

    @property
    def form(self) -> KvFormat:
        return format_of(self.format)


@dataclass(frozen=True)
class RowPrologue:
    """The steps on rows before a transform and quantisation.

    Attributes:
        rope: "none", "half" or "interleaved".
        rotary_dim: number of columns of q and k that are rotated; 0 without RoPE.
        has_bias: whether calls may give biases.
        has_norm: whether calls may give norms of q and k.
    """

    rope: str = "none"
    rotary_dim: int = 0
    has_bias: bool = False
    has_norm: bool = False

    @property
    def name(self) -> str:
        rope = self.rope if self.rope == "none" else f"{self.rope}{self.rotary_dim}"
        return rope + "_bias" * self.has_bias + "_norm" * self.has_norm

    def problem(self, head_dim: int) -> str | None:
        """Returns why these steps are impossible for rows of q and k of ``head_dim`` columns, or None."""
        if self.rope not in ROPE_STYLES:
            return f"rope {self.rope!r} is not one of {', '.join(ROPE_STYLES)}"
        if self.rope == "none" and self.rotary_dim:
            return f"rotary_dim {self.rotary_dim} without RoPE"
        if self.rope != "none" and not (2 <= self.rotary_dim <= head_dim and self.rotary_dim % 2 == 0):
            return f"rotary_dim {self.rotary_dim} is not an even number from 2 to head_dim_k = {head_dim}"
        return None


AS_THEY_COME = RowPrologue()


@dataclass(frozen=True)
class AppendConfig:
    """One compiled variant of the append kernel.

    Attributes:
        k, v: formats and sizes of the rows that are written.
        dtype: the dtype of q, k and v, "bf16" or "fp16".
        prologue: the steps before the transform.
        lane_columns: the wanted number of columns of a lane (see `team_lanes`) in configurations whose lanes have whole
            RoPE pairs (``runs`` is 2). In other configurations `LANE_ELEMENTS` is the wanted number.
        leads: whether attention over the same caches is launched as this kernel's programmatic dependent. If so, the
            kernel lets attention start early, and leaves it the SMs' shared memory.
        decode: whether each request has exactly one new token, at its last position. The kernel then has no code for
            slots, position ids and bounds of requests; see `for_decode`.
        transform: the steps on rows between RoPE and quantisation; None for none.
    """

    k: WrittenRows
    v: WrittenRows
    dtype: str
    prologue: RowPrologue = AS_THEY_COME
    lane_columns: int = 2 * LANE_ELEMENTS
    leads: bool = False
    decode: bool = False
    transform: RowTransform | None = None

    @classmethod
    def alike(cls, kv_format: str, dtype: str, head_dim: int, prologue: RowPrologue = AS_THEY_COME) -> AppendConfig:
        """Returns the configuration whose rows of K and V have the same format and the same number of columns."""
        rows = WrittenRows(kv_format, head_dim)
        return cls(rows, rows, dtype, prologue)

    def for_decode(self) -> AppendConfig:
        """Returns the configuration for calls in which each request has one new token (``decode``). It is faster for
        such calls.

        In such a call a warp runs most of its code once, so fetching instructions takes longer than arithmetic. With
        twice as many lanes to a row, a lane has half the instructions.
        """
        return replace(self, decode=True, lane_columns=LANE_ELEMENTS)

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        return self.k.form, self.v.form

    @property
    def lanes(self) -> int:
        """Number of lanes of a team, which share a row."""
        columns = self.lane_columns if self.runs > 1 else LANE_ELEMENTS
        return team_lanes(self.k.head_dim, self.v.head_dim, lane_columns=columns)

    @property
    def runs(self) -> int:
        """Number of runs of a row's columns that a lane has. If it is 2, the lane has one run in each half of the row,
        and so whole RoPE pairs. Otherwise it is 1.
        """
        whole = self.prologue.rotary_dim == self.k.head_dim == self.v.head_dim and self.k.head_dim in (64, 128, 256)
        return 2 if self.prologue.rope == "half" and whole else 1

    @property
    def tokens_per_warp(self) -> int:
        return WARP_THREADS // self.lanes

    @property
    def tokens_per_cta(self) -> int:
        return NUM_WARPS * self.tokens_per_warp

    @property
    def ctas_per_sm(self) -> int:
        """Number of CTAs that an SM is assumed to hold at a time."""
        counts = DECODE_CTAS_PER_SM if self.lane_columns == LANE_ELEMENTS else CTAS_PER_SM
        if self.transform is None:
            extras = self.decode and (self.prologue.has_bias or self.prologue.has_norm)  # whose words wait in registers
            return counts[0] if not extras else min(counts[0], EXTRAS_CTAS_PER_SM)
        return counts[self.transform.num_parts + (self.transform.shift and self.transform.factor)]

    @property
    def least_ctas(self) -> int:
        """Number of CTAs whose registers must fit into an SM at once; the compiler limits registers accordingly
        (``min_blocks_per_mp``). A transform needs more registers, so with a transform the number is only `ctas_per_sm`.
        """
        return RESIDENT_WARPS // NUM_WARPS if self.transform is None else self.ctas_per_sm

    @property
    def smem_percent(self) -> int:
        """The percentage of an SM's L1 cache and shared memory that the kernel requests as shared memory.

        The percentage is 100 if attention follows (``leads``), else 0. With less than 100, attention could not start on
        an SM before this kernel has ended there.
        """
        return 100 if self.leads else 0

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        k, v = self.k, self.v
        formats = k.format if k.format == v.format else f"{k.format}_{v.format}"
        dims = f"d{k.head_dim}" if k.head_dim == v.head_dim else f"d{k.head_dim}x{v.head_dim}"
        kind = "_decode" * self.decode + "_leads" * self.leads
        kind += f"_{self.transform.name}" if self.transform is not None else ""
        return f"append_{formats}_{self.dtype}_{dims}_{self.prologue.name}_l{self.lane_columns}{kind}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        for name, head_dim in (("head_dim_k", self.k.head_dim), ("head_dim_v", self.v.head_dim)):
            if head_dim not in HEAD_DIMS:
                return f"{name} {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}"
        if self.transform is not None:
            for name, head_dim in (("k_rotation", self.k.head_dim), ("v_rotation", self.v.head_dim)):
                width = getattr(self.transform, name)
                if (wanted := other_rotation(width, head_dim)) is not None:
                    return f"{name} {width} is not {wanted}"
            if self.transform.shift and not self.transform.center:
                return "a shift is what a center takes off"
        return self.prologue.problem(self.k.head_dim)


@dataclass(frozen=True)
class BulkConfig:
    """One compiled variant of the bulk kernels.

    Attributes:
        direction: "quantize" (numbers to rows) or "dequantize" (rows to numbers).
        kv_format: name of the rows' format.
        dtype: the dtype of the numbers, "bf16", "fp16" or "fp32".
        head_dim: number of columns of a row.
        transform: the steps on numbers before quantisation, as a transform of K; None for none.
    """

    direction: str
    kv_format: str
    dtype: str
    head_dim: int
    transform: RowTransform | None = None

    @property
    def format(self) -> KvFormat:
        return format_of(self.kv_format)

    @property
    def lanes(self) -> int:
        return team_lanes(self.head_dim)

    @property
    def teams(self) -> int:
        """Number of teams of a CTA."""
        return BULK_THREADS // self.lanes

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        steps = "" if self.transform is None else f"_{self.transform.name}"
        return f"{self.direction}_{self.kv_format}_{self.dtype}_d{self.head_dim}{steps}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        if self.direction not in ("quantize", "dequantize"):
            return f"direction {self.direction!r} is not 'quantize' or 'dequantize'"
        if format_of(self.kv_format).in_blocks:
            return f"{self.kv_format} rows are written by blocks"
        if self.head_dim not in HEAD_DIMS:
            return f"head_dim {self.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        if self.dtype not in BULK_DTYPES:
            return f"dtype {self.dtype!r} is not one of {', '.join(BULK_DTYPES)}"
        if self.transform is not None:
            if self.direction != "quantize":
                return "a transform is for numbers to quantise"
            width = self.transform.k_rotation
            if (wanted := other_rotation(width, self.head_dim)) is not None:
                return f"k_rotation {width} is not {wanted}"
        return None


RESIDENT_WARPS = 16  # that the registers of an SM must have room for
# CTAs that fit with the registers the append kernels need: without a transform's constants, where rows meet one array
# of them, two, and two on q's side as well. Those for decode need fewer.
CTAS_PER_SM = 9, 8, 8, 8
DECODE_CTAS_PER_SM = 16, 16, 12, 10
EXTRAS_CTAS_PER_SM = 12  # of decode with biases or norms
MAX_ROWS_PER_TEAM = 16  # what precedes the first row, angles above all, is then little beside the rows


def _choose(condition, chosen, other):
    return chosen if condition else other


def rows_per_team(blocks, num_q_heads, num_kv_heads, wave, ratio=1, select=_choose):
    """Returns (q heads, KV heads): how many heads of its token a team processes. They are the smallest numbers for
    which one wave of CTAs suffices.

    A team processes 1, 2, 4 ... or `MAX_ROWS_PER_TEAM` q heads. A team for K or V processes ``ratio`` times fewer heads
    (at least 1), since rows of K and V are more work.

    If tokens are few, each team takes few heads, so that the work is spread over the whole GPU. If tokens are many,
    more heads share the work of making a token's angles.

    Args:
        blocks: number of CTAs that the tokens need if each team processes one set of heads.
        num_q_heads, num_kv_heads: heads of a token; a team's heads are all of q, all of k or all of v.
        wave: number of CTAs that the GPU holds at a time.
        select: a function of (condition, value if true, value if false); the kernel's launch code passes that of the
            DSL.
    """
    q_rows, kv_rows = 1, 1
    for fewer in (1 << i for i in range(MAX_ROWS_PER_TEAM.bit_length() - 1)):
        fewer_kv = max(fewer // ratio, 1)
        teams = (num_q_heads + fewer - 1) // fewer + 2 * ((num_kv_heads + fewer_kv - 1) // fewer_kv)
        q_rows = select(blocks * teams > wave, 2 * fewer, q_rows)
        kv_rows = select(blocks * teams > wave, max(2 * fewer // ratio, 1), kv_rows)
    return q_rows, kv_rows


def divisor_of(divisor: int) -> int:
    """Returns the factor by which kernels multiply to divide by ``divisor``: ceil(2**63 / divisor) as a signed 64-bit
    integer.

    For value < 2**63 / divisor, floor(value / divisor) is the upper 64 bits of 2 * value times this factor.
    """
    magic = -(-(2**63) // divisor)
    return magic - 2**64 if magic >= 2**63 else magic
