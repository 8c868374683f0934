"""Products of layers of experts as subjects of tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from cute_kernels.gemm import plan as linear_plan
from cute_kernels.gemm.config import NO_ACTIVATION, SWIGLU
from cute_kernels.gemm.experts.compile import GatherSpec, specs_of
from cute_kernels.gemm.experts.config import GatherConfig
from cute_kernels.gemm.experts.launch import Routing, addresses_of, launch_gather
from cute_kernels.gemm.experts.plan import ProductPlan, make_product_plan
from cute_kernels.gemm.experts.schedule import GroupedProblem
from cute_kernels.gemm.experts.tuned import GroupedCandidate, key_of, worth_measuring
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.tuning.linear import TORCH_DTYPES, Format, agree, random_parts
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.runtime.spec import KernelSpec

LAYERS = ((8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048))  # experts, topk, hidden, intermediate


class Experts:
    """The weights of the product that was asked for last, as `cute_kernels.gemm.tuning.linear.Weights`."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = device
        self._held: tuple[tuple[object, ...], PackedExperts] | None = None

    def of(self, problem: GroupedProblem) -> PackedExperts:
        shape = (problem.n, problem.k)
        key = problem.num_experts, shape, problem.format, problem.dtype
        if self._held is None or self._held[0] != key:
            self._held = None  # its memory may be wanted
            parts = random_parts(problem.dense(1), (problem.num_experts,), self.device)
            self._held = key, PackedExperts(*parts, problem.format, shape)
        return self._held[1]


@dataclass
class ExpertsSubject:
    """One of the two products of a layer, with rows that fall to experts at random.

    Attributes:
        topk: experts of a token.
        is_first: whether it is that of gate and up, which takes rows of x by index and ends in SwiGLU. Rows of the
            other one lie in the order of the places.
    """

    problem: GroupedProblem
    topk: int
    is_first: bool
    experts: Experts = field(repr=False)

    @cached_property
    def candidates(self) -> list[GroupedCandidate]:
        return worth_measuring(self.problem)

    @property
    def key(self) -> str:
        return key_of(self.problem)

    @property
    def names(self) -> Sequence[tuple[str, str, int]]:
        return [candidate.name for candidate in self.candidates]

    def specs(self) -> list[KernelSpec]:
        """The kernels of all candidates, and what brings rows in order."""
        found = [spec for one in self.candidates for spec in specs_of(one.schedule.config)]
        return list(dict.fromkeys([*found, GatherSpec(GatherConfig(self.problem.dtype))]))

    def calls(self) -> list[Callable[[], object] | None]:
        """See `Subject.calls`: launches that write to the same outputs."""
        problem, weight = self.problem, self.experts.of(self.problem)
        dtype, device = TORCH_DTYPES[problem.dtype], weight.device
        routing = random_routing(problem, self.topk, device)
        rows = problem.places // self.topk if self.is_first else problem.places
        x = torch.randn((rows, -(-problem.k // 8) * 8), device=device).to(dtype)
        x[:, problem.k :] = 0
        columns = problem.n // 2 if self.is_first else problem.n
        outs = [torch.empty((problem.places, columns), dtype=kind, device=device) for kind in (dtype, torch.float32)]
        calls: list[Callable[[], object] | None] = []
        first = None
        for candidate in self.candidates:
            made = self.plan(candidate, x.get_device())
            out = outs[made.stores_fp32 and not self.is_first]  # a layer keeps such results in fp32
            call = partial(self._run, made, x, weight, routing, out)
            out.fill_(torch.nan)
            call()
            first = out.clone() if first is None else first
            calls.append(call if agree(out, first) else None)
        return calls

    def plan(self, candidate: GroupedCandidate, device: int) -> ProductPlan:
        return make_product_plan(candidate.schedule, self.problem.places, self.problem.num_experts, device)

    def _run(
        self, plan: ProductPlan, x: torch.Tensor, weight: PackedExperts, routing: Routing, out: torch.Tensor
    ) -> None:
        """As a layer launches it: a kernel that takes rows in their order only has them brought so."""
        rows = routing.rows if self.is_first else None
        if rows is not None and not plan.gathers:
            x, rows = launch_gather(x, routing.offsets, rows), None
        places = routing.offsets.data_ptr(), 0 if rows is None else rows.data_ptr()
        activation = SWIGLU if self.is_first else NO_ACTIVATION
        addresses = *addresses_of(weight), 0, out.data_ptr()
        plan.run(x, addresses, places, (self.problem.n, activation, linear_plan.OUT_KINDS[out.dtype]))


def random_routing(problem: GroupedProblem, topk: int, device: torch.device | str) -> Routing:
    """Offsets and rows, int32, of tokens that each choose ``topk`` experts at random."""
    generator = torch.Generator(device).manual_seed(0)
    scores = torch.rand((problem.places // topk, problem.num_experts), generator=generator, device=device)
    ids = scores.topk(topk).indices.flatten()
    counts = torch.bincount(ids, minlength=problem.num_experts)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return Routing(offsets.int(), (ids.argsort(stable=True) // topk).int())


def subjects(
    layers: Iterable[tuple[int, int, int, int]],
    tokens: Iterable[int],
    formats: Iterable[Format],
    num_sms: int,
    experts: Experts,
) -> list[ExpertsSubject]:
    """Two subjects for each layer (experts, topk, hidden, intermediate), format and number of tokens.

    Those of a product follow one another, as they share its weights.
    """
    tokens, formats = tuple(tokens), tuple(formats)
    found = []
    for count, topk, hidden, inner in layers:
        for form in formats:
            for is_first, (n, k) in ((True, (2 * inner, hidden)), (False, (hidden, inner))):
                k_pad = padded_shape((n, k), form.group_size or None)[1]
                weight = n, k, k_pad, form.format, form.dtype
                problems = (GroupedProblem(topk * each, count, *weight, num_sms=num_sms) for each in tokens)
                found += [ExpertsSubject(problem, topk, is_first, experts) for problem in problems]
    return found
