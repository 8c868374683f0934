"""What a kernel that prepares many rows of x is compiled for. No GPU types."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.linear.inputs.config import THREADS, VECTOR, InputRowsConfig

IN_FLIGHT = 2  # vectors of a thread
FEW_ROWS = 64  # that are made before another launch could have asked for anything


@dataclass(frozen=True)
class ManyRowsConfig(InputRowsConfig):
    """As `InputRowsConfig`, of more than `FEW_ROWS` rows."""

    @property
    def in_flight(self) -> int:
        """Vectors that a thread asks for at a time: one where rows are gathered, which shared memory holds."""
        return 1 if self.room else IN_FLIGHT

    @property
    def name(self) -> str:
        return f"{super().name}_many"


def many_parts_of(config: ManyRowsConfig, k: int) -> int:
    """CTAs of a row: as many as its vectors keep busy; one where each would bring the whole row."""
    vectors = -(-k // VECTOR)
    return 1 if config.room else -(-vectors // (THREADS * config.in_flight))
