"""The configuration of a kernel that prepares rows of x. There are no GPU types here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.gemm.arguments import INPUT_ROWS, CompiledAs
from cute_kernels.gemm.wgmma.results import one_of

DTYPES = ("bf16", "fp16")
VECTOR = 8  # elements of 16 bytes
THREADS = 256
ROOMS = (8192, 32768, 98304)  # inputs of a row that shared memory may hold


@dataclass(frozen=True)
class InputRowsConfig:
    """One compiled variant.

    Attributes:
        dtype: of x, "bf16" or "fp16".
        room: inputs of the longest row, one of `ROOMS`, where they are wanted in another order; else 0.
        scaled: whether each input has a factor.
    """

    dtype: str
    room: int = 0
    scaled: bool = False
    num_threads: ClassVar[int] = THREADS

    def kernel(self) -> CompiledAs:
        """Returns how it is compiled."""
        return CompiledAs("cute_kernels.gemm.inputs.kernel:InputRowsKernel", INPUT_ROWS)

    @property
    def name(self) -> str:
        return f"linear_inputs_{self.dtype}{f'_order{self.room}' if self.room else ''}{'_scaled' * self.scaled}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        return one_of(self.dtype, DTYPES, "dtype") or one_of(self.room, (0, *ROOMS), "room")


def room_for(k: int) -> int | None:
    """The least of `ROOMS` that holds a row of k inputs; None if none does."""
    return next((room for room in ROOMS if k <= room), None)


def parts_of(m: int, k: int, num_sms: int, room: int = 0) -> int:
    """The number of CTAs of a row, each with at least a vector a thread.

    A part of all rows is made before the next part, so rows that are gathered several times are read from L2. CTAs that
    load all of a row, as with ``room``, are one or two for each SM.
    """
    most = -(-k // (VECTOR * THREADS))
    return max(1, min(2 * num_sms // m, most)) if room else most
