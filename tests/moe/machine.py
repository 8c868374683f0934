"""A small GPU of Python threads: runs the code of kernels as it stands, a thread for each of theirs.

Scalars are Python integers and NumPy floats, shared and global memory are bytes, and what threads do together (warp
exchanges, barriers, bulk copies counted by an mbarrier) is done by them together, in whatever order they come. So what
is run are the kernels' own addresses, loops and waits; the tensor cores are not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("greenlet", reason="threads of the machine are greenlets: pip install .[dev]")

from simulator import Meanings
from simulator.mbarriers import Mbarrier
from simulator.turns import Turns

MOST_POLLS = 100_000  # of a kernel's threads together, who take turns in the order of a seed: more is a deadlock


class Word(int):
    """A 32-bit word."""

    def bitcast(self, _: Any) -> np.float32:
        return np.uint32(self).view(np.float32)


class Pointer(int):
    """An address in shared memory, or the number of an mbarrier."""

    def __add__(self, other: int) -> Pointer:
        return Pointer(int(self) + int(other))

    def toint(self) -> int:
        return int(self)


def int32(value: Any) -> int:
    return (int(value) + 2**31) % 2**32 - 2**31


def uint32(value: Any) -> Word:
    return Word(int(value) % 2**32)


def bf16_bits(value: Any) -> int:
    """A number rounded to the nearest BF16, ties to even, as bits."""
    bits = int(np.float32(value).view(np.uint32))
    return 0x7FC0 if value != value else bits + 0x7FFF + (bits >> 16 & 1) >> 16


def fp16_bits(value: Any) -> int:
    """A number rounded to the nearest FP16, ties to even, as bits."""
    return int(np.float32(value).astype(np.float16).view(np.uint16))


def e4m3_bits(value: Any) -> int:
    """A number of at most 448 rounded to the nearest E4M3, ties to even, as bits."""
    if value != value:
        return 0x7F
    magnitude = min(abs(float(value)), 448.0)
    exponent = max(math.frexp(magnitude)[1] - 1, -6) if magnitude else -6
    return (math.copysign(1, value) < 0) << 7 | 8 * (exponent + 6) + round(math.ldexp(magnitude, 3 - exponent))


class Registers(list):
    """A thread's own numbers of a kind."""

    def __init__(self, count: int, kind: Callable[[float], Any]):
        super().__init__([0] * count)
        self.kind = kind

    def fill(self, value: float) -> None:
        self[:] = [self.kind(value)] * len(self)


class Barrier(Mbarrier):
    """An mbarrier whose waiting threads are woken by those who end a phase."""

    def __init__(self, count: int, turns: Turns):
        super().__init__(count)
        self.turns: Turns = turns
        self.waiting: list[Any] = []

    def change(self, arrivals: int = 0, num_bytes: int = 0) -> bool:
        if ended := super().change(arrivals, num_bytes):
            self.turns.wake(self.waiting)
        return ended

    def wait(self, parity: int) -> None:
        while not self.passes(parity):
            self.turns.wait(self.waiting)


class NamedBarrier:
    """A barrier of some of a CTA's threads, of which some may only say that they have come."""

    def __init__(self, parties: int, turns: Turns):
        self.parties, self.come = parties, 0
        self.turns: Turns = turns
        self.waiting: list[Any] = []

    def pass_by(self, waits: bool = True) -> None:
        self.come += 1
        if self.come == self.parties:
            self.come = 0
            self.turns.wake(self.waiting)
        elif waits:
            self.turns.wait(self.waiting)


class Cta:
    """What the threads of a CTA share."""

    def __init__(self, block: tuple[int, int, int], num_threads: int, turns: Turns, shared_bytes: int = 1 << 18):
        self.block = block
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)  # NaN, whatever it is read as
        self.barriers: dict[int, Barrier] = {}
        self.all = NamedBarrier(num_threads, turns)
        self.warps = [NamedBarrier(32, turns) for _ in range(num_threads // 32)]
        self.named: dict[int, NamedBarrier] = {}
        self.exchange: list[list[Any]] = [[None] * 32 for _ in self.warps]
        self.used = 0


class Machine:
    """Memory, and the modules that kernels see in place of the DSL's."""

    def __init__(self, global_bytes: int = 1 << 22):
        self.memory = np.zeros(global_bytes, np.uint8)
        self.top = 256
        self.turns = Turns()
        self.grid = (1, 1, 1)  # what kernels that ask for it are launched with
        self.copies: list[tuple[tuple[int, int, int], int, int]] = []  # CTA, source, bytes

    # -- memory -------------------------------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor | None) -> int:
        """Copies a tensor to global memory; its address, 0 for none."""
        if tensor is None:
            return 0
        address, size = self.top, tensor.nbytes
        self.memory[address : address + size] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self.top = -(-(address + size) // 256) * 256
        assert self.top <= self.memory.size
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(self.memory[address : address + size].copy()).view(dtype).view(shape)

    # -- threads ------------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], None], blocks: list[tuple[int, int, int]], num_threads: int) -> None:
        """Runs a kernel: all CTAs at the same time."""
        self.turns, self.polls = Turns(), 0
        bodies = []
        for block in blocks:
            cta = Cta(block, num_threads, self.turns)
            bodies += [partial(self._thread, work, cta, number) for number in range(num_threads)]
        self.turns.run(bodies)

    def _thread(self, work: Callable[[], None], cta: Cta, number: int) -> None:
        self.here.cta, self.here.thread, self.here.allocated, self.here.idle = cta, number, 0, False
        work()

    @property
    def here(self) -> Any:
        """What the thread that asks has of its own."""
        return self.turns.own()

    @property
    def cta(self) -> Cta:
        return self.turns.own().cta

    @property
    def warp(self) -> int:
        return self.here.thread // 32

    @property
    def lane(self) -> int:
        return self.here.thread % 32

    def sync_warp(self) -> None:
        self.cta.warps[self.here.thread // 32].pass_by()

    def barrier(self, barrier_id: int, number_of_threads: int, waits: bool = True) -> None:
        """A barrier of some of the CTA's threads."""
        named = self.cta.named.setdefault(barrier_id, NamedBarrier(number_of_threads, self.turns))
        assert named.parties == number_of_threads
        named.pass_by(waits)

    @contextmanager
    def elect_one(self) -> Iterator[None]:
        """What a warp's first lane does alone: others do it, too, but change no barrier and copy nothing."""
        self.sync_warp()
        self.here.idle = self.lane != 0
        yield
        self.here.idle = False

    def exchanged(self, value: int) -> list[int]:
        """The values of all lanes. Each exchange has a list of its own, so nobody waits before the next one."""
        here = self.here
        cta, (warp, lane) = here.cta, divmod(here.thread, 32)
        values = cta.exchange[warp]
        values[lane] = value
        if None not in values:
            cta.exchange[warp] = [None] * 32
        cta.warps[warp].pass_by()
        return values

    # -- mbarriers ----------------------------------------------------------------------------------------------------

    def mbarrier_init(self, barrier: int, count: int) -> None:
        self.cta.barriers[int(barrier)] = Barrier(count, self.turns)

    def mbarrier_change(self, barrier: int, arrivals: int, num_bytes: int) -> None:
        if self.here.idle:
            return
        self.cta.barriers[int(barrier)].change(arrivals, num_bytes)

    def mbarrier_wait(self, barrier: int, parity: int) -> None:
        self.cta.barriers[int(barrier)].wait(parity)

    # -- instructions, under the names of `cute_kernels.device.ptx` ---------------------------------------------------

    def ptx(self) -> SimpleNamespace:
        def words(memory: np.ndarray, address: int, count: int) -> list[Word]:
            assert address >= 0 and address % (4 * count) == 0, "misaligned access"
            return [Word(word) for word in memory[address : address + 4 * count].view(np.uint32)]

        def store(memory: np.ndarray, address: int, values: list) -> None:
            assert address >= 0 and address % (4 * len(values)) == 0, "misaligned access"
            for i, value in enumerate(values):
                bits = value.view(np.uint32) if isinstance(value, np.floating) else np.uint32(int(value) % 2**32)
                memory[address + 4 * i : address + 4 * i + 4].view(np.uint32)[0] = bits

        def load_relaxed(address: int, count: int, *, offset: int = 0) -> list[Word]:
            self.turns.pause()
            self.polls += 1
            assert self.polls <= MOST_POLLS, f"deadlock: CTA {self.cta.block} polls"
            return words(self.memory, address + offset, count)

        def bulk_copy(destination: int, source: int, size: int, barrier: int) -> None:
            assert destination % 16 == source % 16 == size % 16 == 0 and size > 0, "misaligned copy"
            assert source >= 256
            if self.here.idle:
                return
            self.cta.shared[destination : destination + size] = self.memory[source : source + size]
            self.copies.append((self.cta.block, source, size))
            self.mbarrier_change(barrier, 0, -size)

        def store_half(address: int, offset: int, word: Word) -> None:
            place = address + offset
            self.cta.shared[place : place + 2].view(np.uint16)[0] = int(word) & 0xFFFF

        def quiet(function: Callable[[Any], Any]) -> Callable[[Any], np.float32]:
            def run(x: Any) -> np.float32:
                with np.errstate(all="ignore"):  # to infinities, as the GPU
                    return np.float32(function(np.float64(x)))

            return run

        return SimpleNamespace(
            address=lambda tensor: tensor.address,
            load_shared=lambda address, offset: words(self.cta.shared, address + offset, 1)[0],
            load_shared_vector=lambda address, offset, n: words(self.cta.shared, address + offset, n),
            store_shared=lambda address, offset, values: store(self.cta.shared, address + offset, values),
            store_shared_zero16=lambda address, offset: store(self.cta.shared, address + offset, [0] * 4),
            load_global_words=lambda address, offset, n, constant=True: words(self.memory, address + offset, n),
            load_relaxed=load_relaxed,
            store_global=lambda address, values, offset=0: store(self.memory, address + offset, values),
            bulk_copy_to_shared=bulk_copy,
            pack_bf16x2=lambda a, b: Word(bf16_bits(a) | bf16_bits(b) << 16),
            pack_f16x2=lambda a, b: Word(fp16_bits(a) | fp16_bits(b) << 16),
            bf16x2_low_to_float=lambda word: np.uint32((int(word) << 16) % 2**32).view(np.float32),
            bf16x2_high_to_float=lambda word: np.uint32(int(word) & 0xFFFF0000).view(np.float32),
            half2_low_to_float=lambda word: np.float32(np.uint16(int(word) & 0xFFFF).view(np.float16)),
            half2_high_to_float=lambda word: np.float32(np.uint16(int(word) >> 16).view(np.float16)),
            load_relaxed_part=lambda address, size: self.numbers().load_global_part(address, 0, size),
            fma=lambda a, b, c: np.float32(float(a) * float(b) + float(c)),
            exp2=quiet(np.exp2),
            log2=quiet(np.log2),
            fmax=np.fmax,
            min_or_nan=np.minimum,
            max_or_nan=np.maximum,
            store_shared_half=store_half,
            pinned=lambda x: x,
            reciprocal=quiet(np.reciprocal),
            warp_sum=lambda x: sum(self.exchanged(x)),
            LOG2_E=1.4426950408889634,
        )

    def numbers(self) -> SimpleNamespace:
        def load(address: int, offset: int, size: int) -> Word:
            place = address + offset
            return Word(int.from_bytes(self.memory[place : place + size].tobytes(), "little"))

        def store(address: int, offset: int, value: int, size: int) -> None:
            content = (int(value) % 256**size).to_bytes(size, "little")
            self.memory[address + offset : address + offset + size] = np.frombuffer(content, np.uint8)

        return SimpleNamespace(
            load_global_part=load, store_global_part=store, multiply_high_u32=lambda a, b: Word(int(a) * int(b) >> 32)
        )

    def cute(self) -> SimpleNamespace:
        def shuffle_up(value: int, offset: int, mask_and_clamp: int = 0) -> int:
            values = self.exchanged(value)
            return values[self.lane - offset] if self.lane >= offset else value

        arch = SimpleNamespace(
            block_idx=lambda: self.cta.block,
            grid_dim=lambda: self.grid,
            thread_idx=lambda: (self.here.thread, 0, 0),
            warp_idx=lambda: self.here.thread // 32,
            lane_idx=lambda: self.lane,
            make_warp_uniform=lambda value: value,
            sync_threads=lambda: self.cta.all.pass_by(),
            sync_warp=self.sync_warp,
            barrier=self.barrier,
            barrier_arrive=lambda barrier_id, number_of_threads: self.barrier(barrier_id, number_of_threads, False),
            elect_one=self.elect_one,
            clz=lambda value: 32 - int(value).bit_length(),
            shuffle_sync_up=shuffle_up,
            shuffle_sync=lambda value, lane: self.exchanged(value)[lane % 32],
            shuffle_sync_bfly=lambda value, offset: self.exchanged(value)[self.lane ^ offset],
            match_sync=lambda mask, value: sum(1 << i for i, v in enumerate(self.exchanged(value)) if v == value),
            vote_ballot_sync=lambda vote: sum(1 << i for i, v in enumerate(self.exchanged(bool(vote))) if v),
            vote_any_sync=lambda vote: any(self.exchanged(bool(vote))),
            popc=lambda value: int(value).bit_count(),
            mbarrier_init=self.mbarrier_init,
            mbarrier_init_fence=lambda: None,
            mbarrier_arrive=lambda barrier: self.mbarrier_change(barrier, 1, 0),
            mbarrier_arrive_and_expect_tx=lambda barrier, size: self.mbarrier_change(barrier, 1, int(size)),
            mbarrier_wait=self.mbarrier_wait,
            griddepcontrol_wait=lambda: None,
            griddepcontrol_launch_dependents=lambda: None,
        )
        return SimpleNamespace(arch=arch, ceil_div=lambda a, b: -(-a // b), make_rmem_tensor=Registers)

    def cutlass(self) -> SimpleNamespace:
        machine = self

        class Allocator:
            def allocate(self, size: int, byte_alignment: int) -> Pointer:
                start = -(-machine.here.allocated // byte_alignment) * byte_alignment
                machine.here.allocated = start + size
                return Pointer(start)

            def allocate_array(self, _: Any, count: int) -> Pointer:
                return Pointer(self.allocate(8 * count, 8) // 8)

        return SimpleNamespace(
            range=lambda *bounds, unroll=1: range(*bounds),
            range_constexpr=range,
            min=min,
            max=max,
            select_=lambda condition, a, b: a if condition else b,
            utils=SimpleNamespace(SmemAllocator=Allocator),
        )

    def meanings(self) -> Meanings:
        """What kernels see; their functions are plain Python."""
        instructions = SimpleNamespace(**{**vars(self.ptx()), **vars(self.numbers())})
        scalars = {"Int32": int32, "Int64": int, "Uint32": uint32, "Float32": np.float32, "const_expr": bool}
        cute, cutlass = vars(self.cute()), vars(self.cutlass())
        return Meanings(instructions, arch=vars(cute.pop("arch")), cute=cute, cutlass=cutlass, scalars=scalars)
