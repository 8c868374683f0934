"""Runs kernels' own device code in Python and NumPy, on a machine without a GPU: see docs/simulator.md.

Kernels are Python over DSL scalars, `cute_kernels.device.ptx` and `cutlass.cute.arch`. A backend gives all of these
another meaning; :func:`running` puts it in place, for the time of a ``with`` block, in one place for all modules.

    registers   a register of a warp: 32 lanes of one type
    warp        a warp with shared and global memory, instruction by instruction
    gpu         whole kernels over rows of global memory, a warp at a time
    plain       one thread, with Python's integers: for addresses and schedules
    schedule    warps as threads of which one runs at a time, in random order: for barriers
    turns       many threads that take turns: not imported here, as it needs greenlet
    backend     how meanings are installed
"""

from simulator.backend import Altered, Backend, Meanings, running
from simulator.gpu import Gpu
from simulator.plain import PlainThread, stand_in
from simulator.registers import (
    COLUMN,
    LANES,
    ROW,
    Float32,
    Int32,
    Int64,
    Lanes,
    Register,
    Registers,
    Scalar,
    Uint32,
    Uint64,
)
from simulator.schedule import Scheduler
from simulator.warp import Access, Warp

__all__ = [
    "COLUMN",
    "LANES",
    "ROW",
    "Access",
    "Altered",
    "Backend",
    "Float32",
    "Gpu",
    "Int32",
    "Int64",
    "Lanes",
    "Meanings",
    "PlainThread",
    "Register",
    "Registers",
    "Scalar",
    "Scheduler",
    "Uint32",
    "Uint64",
    "Warp",
    "running",
    "stand_in",
]
