"""The configurations of FP8 products. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.formats.weights.base import spelling
from cute_kernels.gemm.arguments import DENSE_ADDRESSES, INPUT_ROWS, TILE_NUMBERS, CompiledAs, matrix_arguments
from cute_kernels.gemm.inputs.config import ROOMS, THREADS
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.config import DTYPES, WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import MMA_GROUP, ROW_SCALE_BYTES, X_SCALE_ALIGNMENT, Mainloop
from cute_kernels.gemm.wgmma.results import Reduction, RowCuts, WholeK, WorkspaceSplitK
from cute_kernels.runtime.spec import one_of

FP8 = "fp8"
X_GROUP = 128  # inputs of a row of x that share a scale, where they are not all of K: a k block
BY_GROUP, BY_ROW, GIVEN = "groups", "rows", "given"  # what has a scale: a row's 128 inputs, a row, all of x
# What is made of rows: codes in the order that FP8 products take, codes in x's own, the bf16 numbers that these and
# their scales stand for, or two int8 limbs for products of bytes.
FOR_PRODUCTS, PLAIN, ROUNDED, LIMBS, INPUTS = "products", "plain", "rounded", "limbs", "inputs"
# Scales have four significant bits, rounded up but for what is an fp32 rounding above, as codes have: so what both
# stand for is exact in bf16, and 16-bit products take it.
SCALE_BITS, SCALE_ROUND_UP = 0x7FF00000, 0xFFFF0
SMALL_GROUP_ACC_M = 64  # rows of all tiles of a warpgroup where a k block has several groups: more sums would spill

FP8_TILES = matrix_arguments((*DENSE_ADDRESSES, "x_scales"), (*TILE_NUMBERS, "x_scale_pitch"))
"""The arguments of FP8 products. x: [m, padded k / 2] 16-bit elements, each with two E4M3 codes, in the order that
`.rows` makes. x_scales: fp32 [k blocks, x_scale_pitch], on 16 bytes. x_scale_pitch: a multiple of 4, with room for a
whole last tile and 4 more scales."""
ROWS = matrix_arguments(
    ("end", "rows", "given", "out", "scales"),
    ("places", "out_pieces", "groups", "scale_groups", "group_stride", "place_stride"),
)
"""The arguments of the kernel that makes rows of x in E4M3 or in limbs.

x: [.., k] of 16-bit elements, k a multiple of 8, on 16 bytes. end: address of an int32, the number of rows of out that
are written; 0: all. rows: int32 [places]; row i of out is made of row rows[i] of x, or of row i if ``rows`` is 0.
given: address of the scale of all of x. out: [places, out_pieces], pieces of 8 inputs each, zeros after k. groups: how
many groups of 128 inputs out has. scales: fp32; each row of out stores those of its first scale_groups groups.
group_stride, place_stride: the distance, in scales, from a group, or a row of out, to the next.
"""


def fp8_problem(form: WeightFormat) -> str | None:
    """Returns why weights of a format cannot be operands of FP8 products, or None if they can."""
    if form.e4m3_decoder() is None:
        return "codes that are E4M3 numbers exactly: FP8, MXFP8, MXFP4 or 4-bit integers without zero points"
    if form.group_size and form.group_size < MMA_GROUP:
        return f"groups of at least {MMA_GROUP} inputs, those of an MMA"
    return "no scales of a second level" if form.row_scales else None


def check_activations(activations: object, scale: object, form: WeightFormat, k: int = X_GROUP) -> bool:
    """Returns whether ``activations`` asks for products in FP8. Raises ValueError if a weight of format ``form`` with
    ``k`` inputs does not support them.
    """
    if activations is None:
        if scale is not None:
            raise ValueError("activation_scale: got one with activations None, want None, or activations 'fp8'")
        return False
    if activations != FP8:
        raise ValueError(f"activations: got {activations!r}, want None (16 bits) or {FP8!r}")
    problem = fp8_problem(form) or ("no zero points" if form.has_zeros else None)
    if problem is not None:
        wanted = f"None (16-bit products), or weights with {problem}"
        raise ValueError(f"activations: got {FP8!r} for weights in {spelling(form)}, want {wanted}")
    whole_k(padded_shape((0, k), form.group_size)[1])
    return True


def x_group(form: WeightFormat) -> int:
    """Returns how many inputs of a row of x share a scale, for weights of a format; 0 if x has one scale per row.

    x has scales of groups only if weights have 8-bit codes in groups: DeepSeek's checkpoints were calibrated with such
    scales. Adding a sum to the accumulators takes one instruction with one scale per row, and two with groups.
    """
    return X_GROUP if form.group_size and form.bits == 8 else 0


def whole_k(k_pad: int) -> int:
    """Returns K rounded up to whole k blocks. The weight's padded K may end in half a k block.

    Raises ValueError: the weight has less than one k block.
    """
    if k_pad < X_GROUP:
        wanted = f"None (16-bit products), or at least {X_GROUP}"
        raise ValueError(f"activations: got {FP8!r} for a weight of {k_pad} inputs with padding, want {wanted}")
    return -(-k_pad // X_GROUP) * X_GROUP


def groups_apart(form: WeightFormat) -> int:
    """Returns the number of groups of a k block whose sums are kept and scaled separately."""
    decoder = form.e4m3_decoder()
    return 1 if decoder is None or decoder.folds or not form.group_size else max(X_GROUP // form.group_size, 1)


@dataclass(frozen=True)
class Fp8Wgmma(Mainloop):
    """The mainloop of E4M3 wgmma with decoded weights in registers. The sums of each group are promoted to fp32: see
    `.fp8_mainloop`.

    Attributes:
        half_last: whether K ends in half a k block. The last k block then begins half a k block earlier. x has zeros
            for the inputs that this k block shares with the one before: `.fp8_tail`.
    """

    half_last: bool = False
    made_by: ClassVar[str] = "cute_kernels.gemm.operands.fp8_mainloop:Fp8Mainloop"
    reductions: ClassVar[tuple[type[Reduction], ...]] = (WholeK, RowCuts, WorkspaceSplitK)
    scaled_rows: ClassVar[bool] = True
    multicasts: ClassVar[bool] = True
    block_k_sizes: ClassVar[tuple[int, ...]] = (X_GROUP,)

    @property
    def name(self) -> str:
        return "e4m3tail" if self.half_last else "e4m3"

    @property
    def weights_by(self) -> str:
        """The import path of the code that loads weights. `.fp8_tail` has the code for a half k block."""
        return "cute_kernels.gemm.operands.fp8_tail:TailWeightLoads" if self.half_last else super().weights_by

    def kernel(self) -> CompiledAs:
        return CompiledAs("cute_kernels.gemm.wgmma.kernel:WgmmaKernel", FP8_TILES)

    def x_tma_tiles(self, config: WgmmaConfig) -> int:
        return config.block_k // X_GROUP  # rows of 128 bytes

    def is_ping_pong(self, config: WgmmaConfig) -> bool:
        """Whether two warpgroups alternate (`.fp8_mainloop.PingPong`). They do if a k block has one group and tile_m is
        large: a thread then has no registers for the sums of two groups at a time.
        """
        return groups_apart(config.format) == 1 and config.warpgroups == 2 and config.tile_m > SMALL_GROUP_ACC_M

    def x_scale_stage_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes of x's fp32 scales in a stage, with room for a copy that begins at a multiple of 16 bytes.
        Returns 0 if x has one scale per row."""
        return ROW_SCALE_BYTES * (config.tile_m + X_SCALE_ALIGNMENT) if x_group(config.format) else 0

    def problem(self, config: WgmmaConfig) -> str | None:
        wanted, rows = fp8_problem(config.format), config.tile_m * config.n_tiles
        if self.half_last and config.group_size >= X_GROUP:
            return f"groups of {config.group_size} inputs end with a k block"
        if wanted is None and groups_apart(config.format) > 1 and rows > SMALL_GROUP_ACC_M:
            return f"{rows} rows of all tiles are more than the {SMALL_GROUP_ACC_M} of groups of {config.group_size}"
        return None if wanted is None else f"FP8 products want {wanted}, not {config.format.key}"


@dataclass(frozen=True)
class RowsConfig:
    """The configuration of a kernel that makes rows of x: codes with scales, or rows in x's own dtype.

    Attributes:
        dtype: dtype of x, "bf16" or "fp16".
        scales: the inputs that share a scale: 128 inputs of a row (`BY_GROUP`), a row (`BY_ROW`), or all of x
            (`GIVEN`).
        makes: the kind of rows to make. `FOR_PRODUCTS`, `PLAIN` and `ROUNDED` are E4M3. `LIMBS` are limbs with a scale
            for each group. `INPUTS` are 16-bit rows, gathered, permuted and scaled (`cute_kernels.gemm.inputs`).
        half_last: for codes, whether the last 128 inputs are 64 zeros and then the row's last 64 inputs: see
            `Fp8Wgmma`.
        room: for `INPUTS` that are permuted, the largest supported number of inputs of a row, one of `ROOMS`. Otherwise
            0.
        scaled: for `INPUTS`, whether each input is multiplied by a factor.
    """

    dtype: str
    scales: str = BY_GROUP
    makes: str = FOR_PRODUCTS
    half_last: bool = False
    room: int = 0
    scaled: bool = False
    num_threads: ClassVar[int] = THREADS

    def kernel(self) -> CompiledAs:
        """Returns the kernel class and the launch arguments."""
        if self.makes == INPUTS:
            return CompiledAs("cute_kernels.gemm.inputs.kernel:InputRowsKernel", INPUT_ROWS)
        return CompiledAs("cute_kernels.gemm.operands.rows:RowsKernel", ROWS)

    @property
    def name(self) -> str:
        if self.makes == INPUTS:
            return f"linear_inputs_{self.dtype}{f'_order{self.room}' if self.room else ''}{'_scaled' * self.scaled}"
        if self.makes == LIMBS:
            return f"linear_limbs_{self.dtype}"
        kind = "_half" if self.half_last else "" if self.makes == FOR_PRODUCTS else f"_{self.makes}"
        return f"linear_fp8_rows_{self.dtype}_{self.scales}{kind}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        scales = (BY_GROUP,) if self.makes == LIMBS else (BY_GROUP, BY_ROW, GIVEN)
        makes = (FOR_PRODUCTS, PLAIN, ROUNDED, LIMBS, INPUTS)
        kinds = one_of(self.scales, scales, "scales") or one_of(self.makes, makes, "makes")
        rooms = (0, *ROOMS) if self.makes == INPUTS else (0,)
        return one_of(self.dtype, DTYPES, "dtype") or kinds or one_of(self.room, rooms, "room")
