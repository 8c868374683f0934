"""What a kernel that prepares rows of x is compiled for, and how rows are shared out. No GPU types."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bf16", "fp16")
VECTOR = 8  # elements of 16 bytes
THREADS, GROUP_THREADS = 256, 512  # of a CTA; of one that has whole rows of a group
ROOMS = (8192, 16384, 32768, 98304)  # inputs of a row that shared memory may hold
GROUP = 4  # rows that share what is read of order and factors
GROUP_ROOM = 16384  # inputs of the longest rows of which shared memory holds so many
LEAST_VECTORS = 32  # of a row that a CTA makes


@dataclass(frozen=True)
class InputRowsConfig:
    """One compiled variant.

    Attributes:
        dtype: of x, "bf16" or "fp16".
        room: inputs of the longest row, one of `ROOMS`, where they are wanted in another order; else 0.
        scaled: whether each input has a factor.
        rows: that a CTA makes at a time, 1 or `GROUP`; without another order always `GROUP`.
    """

    dtype: str
    room: int = 0
    scaled: bool = False
    rows: int = 1

    @property
    def num_threads(self) -> int:
        return GROUP_THREADS if self.room and self.rows > 1 else THREADS

    @property
    def name(self) -> str:
        order = f"_order{self.room}" if self.room else ""
        return f"linear_inputs_{self.dtype}{order}{'_scaled' * self.scaled}{f'_x{self.rows}' * (self.rows > 1)}"

    def can_implement(self) -> str | None:
        """Why this configuration cannot be compiled, or None."""
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}"
        if self.room not in (0, *ROOMS):
            return f"room {self.room!r} is not 0 or one of {', '.join(map(str, ROOMS))}"
        if self.rows not in (1, GROUP):
            return f"rows {self.rows!r} is not 1 or {GROUP}"
        if self.room > GROUP_ROOM and self.rows > 1:
            return f"shared memory does not hold {self.rows} rows of {self.room} inputs"
        return None


def room_for(k: int) -> int | None:
    """The least of `ROOMS` that holds a row of k inputs; None if none does."""
    return next((room for room in ROOMS if k <= room), None)


def rows_for(m: int, room: int, num_sms: int) -> int:
    """Rows that a CTA makes at a time. Few rows are shared out among SMs, of whom each wants a row as a whole."""
    return GROUP if room == 0 or (m > num_sms and room <= GROUP_ROOM) else 1


def parts_of(m: int, k: int, config: InputRowsConfig, num_sms: int) -> int:
    """CTAs of a group of rows: every SM has one where there are few rows, and a thread a vector of each row at most
    where a row need not be there as a whole."""
    groups, vectors = -(-m // config.rows), -(-k // VECTOR)
    parts = max(1, min(num_sms // groups, -(-vectors // LEAST_VECTORS)))
    return parts if config.room else max(parts, -(-vectors // THREADS))
