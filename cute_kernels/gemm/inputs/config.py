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
    """One compiled variant of the kernel that prepares rows of x.

    Attributes:
        dtype: of x, "bf16" or "fp16".
        room: where the order of inputs changes, the most inputs of a row, one of `ROOMS`; else 0.
        scaled: whether each input has a factor.
    """

    dtype: str
    room: int = 0
    scaled: bool = False
    num_threads: ClassVar[int] = THREADS

    def kernel(self) -> CompiledAs:
        """Returns the kernel class and the launch arguments."""
        return CompiledAs("cute_kernels.gemm.inputs.kernel:InputRowsKernel", INPUT_ROWS)

    @property
    def name(self) -> str:
        return f"linear_inputs_{self.dtype}{f'_order{self.room}' if self.room else ''}{'_scaled' * self.scaled}"

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        return one_of(self.dtype, DTYPES, "dtype") or one_of(self.room, (0, *ROOMS), "room")


def room_for(k: int) -> int | None:
    """Returns the least of `ROOMS` that holds a row of k inputs; None if none does."""
    return next((room for room in ROOMS if k <= room), None)


def parts_of(m: int, k: int, num_sms: int, room: int = 0) -> int:
    """Returns the number of CTAs for each row: without ``room`` enough for one vector a thread.

    CTAs make one part of all rows before the next part, so rows that are gathered several times are read from L2. With
    ``room`` each CTA loads all of its row: a row has more than one CTA only as long as all rows' CTAs are at most two
    for each SM.
    """
    most = -(-k // (VECTOR * THREADS))
    return max(1, min(2 * num_sms // m, most)) if room else most
