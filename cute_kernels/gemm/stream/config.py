"""Every compile-time choice of the memory-bound weight-only GEMM, as data. No GPU types here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from cute_kernels.architecture import HOPPER, Limits
from cute_kernels.device.cuda import BARRIER_BYTES, WARP_THREADS
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.activations.base import ActivationFunction, symbol_of
from cute_kernels.gemm.arguments import STREAM_KERNEL, CompiledAs
from cute_kernels.runtime.spec import one_of
from layouts.weights.hopper import TILE_BYTES, TILE_N, tile_k

ROW_WARPS = TILE_N // 16  # warps side by side in a tile: each takes the 16 rows of an MMA
MMA_N = 8  # columns of mma.m16n8
BLOCK_K = (64, 128, 256)
STAGING_PAD = 4  # words between the tokens of the staging buffer, so that fragments are stored without conflicts
X_PAD = 16  # bytes between the tokens in shared memory, so that ldmatrix reads them without conflicts
NUM_BUFFERS = 2  # buffers of results on their way to the epilogue warps
FEW_SEGMENTS = 3  # blocks of a CTA up to which it finishes each before it turns to the next one
ALIGNMENT = 128  # bytes; where regions that bulk copies fill begin


@dataclass(frozen=True)
class Activations(ABC):
    """The policy of activations. It says how a CTA's part of x is loaded into shared memory, and how many bytes the
    part may take.

    Attributes:
        x_bytes: bytes of shared memory for the activations of a CTA's part of K.
        producer_warps: number of warps whose copies fill a stage.
        alignment: alignment of activations in shared memory, in bytes.
    """

    x_bytes: int = 48 * 1024
    producer_warps: ClassVar[int]
    alignment: ClassVar[int]

    @property
    @abstractmethod
    def name(self) -> str:
        """The policy's part of a kernel's name. The name of an activation function, if there is one, comes after it."""

    @abstractmethod
    def kernel(self) -> CompiledAs:
        """Returns the kernel class and the launch arguments of a configuration with these activations."""

    @abstractmethod
    def stage_warps(self, config: StreamConfig[Any]) -> int:
        """Number of warps that release a stage."""

    @abstractmethod
    def problem(self, config: StreamConfig[Any]) -> str | None:
        """Returns why a configuration cannot load its activations in this way, or None."""


@dataclass(frozen=True)
class Slices(Activations):
    """The policy in which a CTA keeps one slice of K, for all rows of x, in shared memory. One warp of the CTA loads
    the slice part by part. A part arrives with the first weights that are multiplied with it: the full barrier of their
    pipeline stage counts its bytes, too.
    """

    producer_warps: ClassVar[int] = 2  # one that copies weights, and one that copies activations
    alignment: ClassVar[int] = ALIGNMENT
    name: ClassVar[str] = ""

    def kernel(self) -> CompiledAs:
        return STREAM_KERNEL

    def stage_warps(self, config: StreamConfig[Any]) -> int:
        """Returns the number of consumer warps: all of them release a stage."""
        return config.consumer_warps

    def problem(self, config: StreamConfig[Any]) -> str | None:
        return None


@dataclass(frozen=True)
class StreamStore:
    """The store of results: epilogue warps read them from staging buffers, see `.epilogue`.

    Attributes:
        epilogue_warps: how many warps add up, store and combine results.
        activation: the activation function that is compiled into the kernel. None: the launch selects a standard
            activation, or none.
    """

    epilogue_warps: int = 4
    activation: ActivationFunction | None = None


SLICES, STREAM_STORE = Slices(), StreamStore()
ActivationsT = TypeVar("ActivationsT", bound=Activations)


@dataclass(frozen=True)
class StreamConfig(Generic[ActivationsT]):
    """One compiled variant of `StreamKernel`.

    A persistent CTA computes *blocks* of ``64 * n_tiles`` output features. K is cut into *k blocks* of ``block_k``
    inputs. A pipeline stage holds a *chunk*: up to ``chunk_k_blocks`` consecutive k blocks of one block's weights. ``4
    * k_warps`` warps multiply: each has 16 rows of every tile, and every ``k_warps``-th k block of a chunk.

    Attributes:
        format: the weight format.
        dtype: dtype of activations, "bf16" or "fp16".
        n_tiles: number of tiles of 64 output features that a warp multiplies with the same activations, 1 or 2.
        k_warps: number of warps that share the k blocks of a chunk.
        block_k: number of inputs of a k block. It divides the padded K and is a multiple of the group size.
        chunk_k_blocks: number of k blocks of a stage.
        num_stages: number of pipeline stages. At any time, nearly all stages are being loaded.
        store: how results are stored.
        activations: how x reaches shared memory.
    """

    limits: ClassVar[Limits] = HOPPER
    tile_m: ClassVar[int] = MMA_N  # rows of x that there is room for
    format: WeightFormat
    dtype: str
    n_tiles: int = 1
    k_warps: int = 2
    block_k: int = 128
    chunk_k_blocks: int = 4
    num_stages: int = 6
    store: StreamStore = STREAM_STORE
    activations: ActivationsT = SLICES  # type: ignore[assignment]

    @property
    def group_size(self) -> int:
        """How many inputs share a scale; 0 for one scale per output feature."""
        return self.format.group_size

    @property
    def tile_k(self) -> int:
        """Number of inputs in a tile of codes."""
        return tile_k(self.format.bits)

    @property
    def block_rows(self) -> int:
        """Number of a block's output features."""
        return TILE_N * self.n_tiles

    @property
    def consumer_warps(self) -> int:
        return ROW_WARPS * self.k_warps

    @property
    def producer_warps(self) -> int:
        return self.activations.producer_warps

    @property
    def stage_warps(self) -> int:
        """Number of warps that release a stage."""
        return self.activations.stage_warps(self)

    @property
    def num_threads(self) -> int:
        """Number of threads of a CTA's consumer, producer and epilogue warps."""
        return (self.consumer_warps + self.producer_warps + self.store.epilogue_warps) * WARP_THREADS

    @property
    def x_bytes(self) -> int:
        """Bytes of shared memory for activations."""
        return self.activations.x_bytes

    @property
    def k_block_tiles(self) -> int:
        return self.block_k // self.tile_k

    @property
    def k_block_groups(self) -> int:
        """Number of a k block's groups; 0 if scales are per output feature."""
        return self.block_k // self.group_size if self.group_size else 0

    @property
    def k_block_bytes(self) -> int:
        """Bytes of the codes of one tile's k block."""
        return self.k_block_tiles * TILE_BYTES

    @property
    def k_block_scale_bytes(self) -> int:
        return self.k_block_groups * self.format.group_scale_bytes

    @property
    def more_scale_bytes(self) -> int:
        """Bytes of a tile's second-level scales."""
        return self.format.more_groups * self.format.group_scale_bytes

    @property
    def k_block_zero_bytes(self) -> int:
        return self.k_block_groups * self.format.group_zero_bytes

    @property
    def k_block_stage_bytes(self) -> int:
        """Bytes of a stage for one k block: codes, scales and zero points of all tiles of a block."""
        return self.n_tiles * (self.k_block_bytes + self.k_block_scale_bytes + self.k_block_zero_bytes)

    @property
    def scale_offset(self) -> int:
        """The offset in bytes of the scales in a stage. The codes of all tiles lie before the scales."""
        return self.n_tiles * self.chunk_k_blocks * self.k_block_bytes

    @property
    def zero_offset(self) -> int:
        """The offset of the zero points in a stage."""
        return self.scale_offset + self.n_tiles * self.chunk_k_blocks * self.k_block_scale_bytes

    @property
    def stage_bytes(self) -> int:
        return _round_up(self.chunk_k_blocks * self.k_block_stage_bytes, ALIGNMENT)

    @property
    def stages_bytes(self) -> int:
        return self.num_stages * self.stage_bytes

    @property
    def staging_pitch(self) -> int:
        """Bytes from a token to the next in a staging buffer."""
        return (self.block_rows + STAGING_PAD) * 4

    @property
    def slice_bytes(self) -> int:
        """Bytes of one set of partial results in a staging buffer. The four warps that multiply the same k blocks write
        one set.
        """
        return self.tile_m * self.staging_pitch

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one staging buffer."""
        return self.k_warps * self.slice_bytes

    @property
    def num_barriers(self) -> int:
        """The number of mbarriers: two for each stage, and two for each staging buffer."""
        return 2 * self.num_stages + 2 * NUM_BUFFERS

    @property
    def smem_bytes(self) -> int:
        return (
            self.stages_bytes
            + _round_up(self.x_bytes, ALIGNMENT)
            + _round_up(NUM_BUFFERS * self.buffer_bytes, ALIGNMENT)
            + self.num_barriers * BARRIER_BYTES
        )

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        weight = self.format.symbol_name(self.dtype)
        shape = f"m{self.tile_m}n{self.block_rows}k{self.block_k}w{self.k_warps}e{self.store.epilogue_warps}"
        state = f"c{self.chunk_k_blocks}r{self.num_stages}b{NUM_BUFFERS}x{self.x_bytes // 1024}"
        ends = f"{self.activations.name}{symbol_of(self.store.activation)}"
        return f"linear_{weight}_{shape}_{state}{ends}"

    def kernel(self) -> CompiledAs:
        """Returns the kernel class and the launch arguments."""
        return self.activations.kernel()

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        return self.activations.problem(self) or self._problem()

    def _problem(self) -> str | None:
        if reason := (
            one_of(self.dtype, self.format.dtypes, "dtype")
            or one_of(self.n_tiles, (1, 2), "n_tiles")
            or one_of(self.block_k, BLOCK_K, "block_k")
            or one_of(self.store.epilogue_warps, (1, 2, 3, 4), "epilogue_warps")
        ):
            return reason
        if self.group_size and self.block_k % self.group_size:
            return f"block_k {self.block_k} is not a multiple of group_size {self.group_size}"
        if self.k_warps < 1 or self.chunk_k_blocks < 1:
            return f"k_warps {self.k_warps} and chunk_k_blocks {self.chunk_k_blocks} must be at least 1"
        if self.num_stages < 2:
            return f"num_stages {self.num_stages} is not at least 2"
        return self.limits.refuses(self.num_threads, self.smem_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
