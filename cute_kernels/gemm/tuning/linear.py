"""Weight-only linear layers as subjects of tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from cute_kernels.formats.weights import WeightFormat, integers
from cute_kernels.gemm import plan
from cute_kernels.gemm.compile import specs_of
from cute_kernels.gemm.config import NO_ACTIVATION
from cute_kernels.gemm.schedule import LinearProblem, StreamSchedule
from cute_kernels.gemm.tuned import Candidate, key_of, worth_measuring
from cute_kernels.gemm.weight import TILE_BYTES, TILE_N, PackedWeight, num_groups, padded_shape
from cute_kernels.gemm.wgmma.schedule import TileSchedule
from cute_kernels.runtime.spec import KernelSpec
from layouts.weights.hopper import tile_k

LAYERS = ((8192, 8192), (8192, 28672), (57344, 8192), (28672, 4096), (4096, 4096))  # N, K
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
AGREEMENT = 1e-2  # relative, of two candidates' results in 16 bits
TORCH_DTYPES = {name: dtype for dtype, name in plan.DTYPES.items()}


@dataclass(frozen=True)
class Format:
    """Of a weight of integers, and the dtype of activations, as command lines say them."""

    bits: int = 4
    group_size: int = 128
    zero_point: bool = False
    dtype: str = "bf16"

    @property
    def format(self) -> WeightFormat:
        return integers(self.bits, self.group_size, self.zero_point)

    @property
    def name(self) -> str:
        """As `command.weight_format` takes it."""
        zero = "z" if self.zero_point else ""
        return f"w{self.bits}g{self.group_size or 'channel'}{zero}-{self.dtype}"

    def num_groups(self, n: int, k: int) -> int:
        """Along K of W [n, k]."""
        return num_groups((n, k), self.group_size or None)

    def problem(self, m: int, n: int, k: int, num_sms: int = LinearProblem.num_sms) -> LinearProblem:
        k_pad = padded_shape((n, k), self.group_size or None)[1]
        return LinearProblem(m, n, k, k_pad, self.format, self.dtype, num_sms=num_sms)


class Weights:
    """The weight of the layer that was asked for last: random codes, scales that make results of about k block size."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = device
        self._held: tuple[tuple[object, ...], PackedWeight] | None = None

    def of(self, problem: LinearProblem) -> PackedWeight:
        key = problem.n, problem.k, problem.format, problem.dtype
        if self._held is None or self._held[0] != key:
            self._held = None  # its memory may be wanted
            parts = random_parts(problem, (), self.device)
            self._held = key, PackedWeight(*parts, problem.format, (problem.n, problem.k))
        return self._held[1]


def random_parts(
    problem: LinearProblem, lead: tuple[int, ...], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and zeros [*lead, ...] of a packed weight that makes results of about k block size."""
    shape, form, size = (problem.n, problem.k), problem.format, problem.format.group_size
    tiles = padded_shape(shape, size)[0] // TILE_N
    generator = torch.Generator(device).manual_seed(0)
    code_shape = *lead, tiles, problem.k_pad // tile_k(form.bits), TILE_BYTES
    codes = torch.randint(0, 256, code_shape, dtype=torch.uint8, generator=generator, device=device)
    groups = *lead, tiles, num_groups(shape, size), TILE_N
    scale = problem.k**-0.5 / (1 << (form.bits - 1))
    values = scale * (0.5 + torch.rand(groups, generator=generator, device=device))
    scales = form.stored_scales(values, TORCH_DTYPES[problem.dtype])
    zeros = None
    if form.has_zeros:
        zeros = torch.randint(0, 1 << form.bits, groups, dtype=torch.uint8, generator=generator, device=device)
    return codes, scales, zeros


@dataclass
class LinearSubject:
    """A product, whose weight is made when it is measured."""

    problem: LinearProblem
    weights: Weights = field(repr=False)

    @cached_property
    def candidates(self) -> list[Candidate[StreamSchedule | TileSchedule]]:
        return worth_measuring(self.problem)

    @property
    def key(self) -> str:
        return key_of(self.problem)

    @property
    def names(self) -> Sequence[tuple[str, str, int]]:
        return [candidate.name for candidate in self.candidates]

    def specs(self) -> list[KernelSpec]:
        """The kernels of all candidates."""
        return list(dict.fromkeys(spec for one in self.candidates for spec in specs_of(one.schedule.config)))

    def calls(self) -> list[Callable[[], object] | None]:
        """See `Subject.calls`: launches that write to one output."""
        problem, weight = self.problem, self.weights.of(self.problem)
        dtype = TORCH_DTYPES[problem.dtype]
        x = torch.randn((problem.m, -(-problem.k // 8) * 8), device=weight.device).to(dtype)
        x[:, problem.k :] = 0
        out = torch.empty((problem.m, problem.n), dtype=dtype, device=weight.device)
        zeros = 0 if weight.zeros is None else weight.zeros.data_ptr()
        addresses = (weight.codes.data_ptr(), weight.scales.data_ptr(), zeros, 0, 0, out.data_ptr())
        calls: list[Callable[[], object] | None] = []
        first = None
        for candidate in self.candidates:
            made = self.plan(candidate, x.get_device())
            # What is only an address to the launch is kept by the call.
            call = partial(_run, made, x, addresses, problem.n, plan.OUT_KINDS[dtype], (out, weight))
            out.fill_(torch.nan)
            call()
            first = out.clone() if first is None else first
            calls.append(call if agree(out, first) else None)
        return calls

    def plan(self, candidate: Candidate[StreamSchedule | TileSchedule], device: int) -> plan.LinearPlan:
        return plan.make_plan(candidate.schedule, self.problem.m, device)


def subjects(
    layers: Iterable[tuple[int, int]],
    rows: Iterable[int],
    formats: Iterable[Format],
    num_sms: int,
    weights: Weights,
) -> list[LinearSubject]:
    """A subject for each layer (N, K), format and number of rows; those of a layer follow one another."""
    rows = tuple(rows)
    return [LinearSubject(form.problem(m, n, k, num_sms), weights) for n, k in layers for form in formats for m in rows]


def _run(made, x: torch.Tensor, addresses: tuple[int, ...], n: int, out_kind: int, _kept: object) -> None:
    made.run(x, addresses, n, NO_ACTIVATION, out_kind)


def agree(found: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding; NaN, which out was filled with, is not."""
    difference = (found.float() - first.float()).norm()
    return bool(difference <= AGREEMENT * first.float().norm())
