"""The router kernels' own code, thread by thread on several CTAs, against fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.device.cuda import EMPTY_WORD
from cute_kernels.gemm.experts import Routing
from cute_kernels.gemm.experts.router import kernel as kernels
from cute_kernels.gemm.experts.router.arguments import ROUTER, SELECT
from cute_kernels.gemm.experts.router.config import LOGITS, RouterConfig, lane_experts_of
from cute_kernels.gemm.experts.router.reference import select_reference
from cute_kernels.gemm.experts.router.routing import SCORINGS
from simulator import Altered, Meanings
from tests.launchers import given_to
from tests.moe.machine import Machine, Word

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WARPS = 4  # Python threads are slow
NAMES = {BF16: "bf16", FP16: "fp16"}


class Float32(np.float32):
    """An fp32 number that knows infinity by the name that the DSL has."""

    inf = np.float32(np.inf)


class RouterMachine(Machine):
    """With the instructions that routers have besides; arithmetic is fp32's, infinities and NaN included."""

    def meanings(self) -> Meanings:
        found = super().meanings()

        def rounded(function: Any) -> Any:
            def work(*values: Any) -> np.float32:
                with np.errstate(all="ignore"):
                    return np.float32(function(*(np.float64(value) for value in values)))

            return work

        def load_relaxed_part(address: int, size: int) -> Word:
            self.turns.pause()
            return self.numbers().load_global_part(address, 0, size)

        more = {
            "bits": lambda x: Word(np.float32(x).view(np.uint32)),
            "from_bits": lambda word: np.uint32(int(word)).view(np.float32),
            "fmax": lambda a, b: np.fmax(np.float32(a), np.float32(b)),
            "absolute": lambda x: np.abs(np.float32(x)),
            "exp2": rounded(np.exp2),
            "reciprocal": rounded(lambda x: 1.0 / x),
            "reciprocal_root": rounded(lambda x: 1.0 / np.sqrt(x)),
            "fma": rounded(lambda a, b, c: a * b + c),
            "warp_max": lambda x: max(self.exchanged(x)),
            "load_relaxed_part": load_relaxed_part,
            "prefetch_line": lambda address: None,
        }
        vars(found.instructions).update(more)
        butterfly = {"shuffle_sync_bfly": lambda value, offset: self.exchanged(value)[self.lane ^ offset]}
        return Meanings(
            found.instructions,
            arch={**found.arch, **butterfly},
            cute=found.cute,
            cutlass=found.cutlass,
            scalars={**found.scalars, "Float32": Float32},
        )


@dataclass
class Case:
    """A router's tensors."""

    hidden: torch.Tensor
    weight: torch.Tensor
    routing: Routing
    bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    @property
    def logits(self) -> torch.Tensor:
        logits = self.hidden.double() @ self.weight.double().T
        return logits if self.bias is None else logits + self.bias.double()


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(
    tokens: int,
    experts: int,
    routing: Routing,
    *,
    k: int = 72,
    dtype: torch.dtype = BF16,
    weight: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    correction: torch.dtype | None = None,
) -> Case:
    added = [None if kind is None else noise(experts, seed=i, dtype=kind) for i, kind in enumerate((bias, correction))]
    return Case(noise(tokens, k, dtype=dtype), 0.3 * noise(experts, k, seed=9, dtype=weight or dtype), routing, *added)


def chosen(made: Case, machine: Machine) -> tuple[dict[str, Any], dict[str, int]]:
    """(arguments of either kernel, addresses of its results)."""
    routing, size = made.routing, (len(made.hidden), made.routing.top_k)
    results = {"ids": machine.put(torch.full(size, -7, dtype=torch.int32)), "weights": machine.put(torch.zeros(size))}
    numbers: dict[str, Any] = {
        "top_k": routing.top_k,
        "scoring": SCORINGS.index(routing.scoring),
        "ranks_logits": int(routing.ranks_logits(made.correction is not None)),
        "renormalize": int(routing.renormalize),
        "groups": routing.groups,
        "kept_groups": routing.kept_groups,
        "scale": np.float32(routing.scale),
    }
    for name in ("bias", "correction"):
        tensor = getattr(made, name)
        numbers |= {name: machine.put(tensor), f"{name}_wide": int(tensor is None or tensor.dtype == FP32)}
    numbers["padding"] = machine.put(made.padding)
    return {**numbers, **results}, results


def launched(kind: Any, config: Any, declared: Any, given: dict[str, Any], machine: Machine, run_on: Any) -> None:
    run_on(Altered(machine, modules={kernels: {"WARPS": WARPS}}))
    kernel, calls = kind(config), []

    def launch(grid: tuple[int, int, int], **_: Any) -> None:
        blocks = [(block, 0, 0) for block in range(grid[0])]
        machine.run(lambda: kind.kernel(kernel, *calls[0]), blocks, 32 * WARPS)

    kernel.kernel = lambda *arguments: calls.append(arguments) or SimpleNamespace(launch=launch)
    kind.launch(kernel, given_to(declared, *(given[name] for name in declared.names)), None)


def run(made: Case, run_on: Any, *, expert_shift: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and weights."""
    machine = RouterMachine()
    tokens, experts = len(made.hidden), len(made.weight)
    given, results = chosen(made, machine)
    words = tokens * experts
    workspace = machine.put(torch.full((words,), EMPTY_WORD - 2**32, dtype=torch.int32))
    given |= {
        "hidden": SimpleNamespace(shape=tuple(made.hidden.shape), address=machine.put(made.hidden)),
        "weight": machine.put(made.weight),
        "workspace": workspace,
        "experts": experts,
        "expert_shift": expert_shift,
    }
    weight = "own" if made.weight.dtype == made.hidden.dtype else "fp32"
    config = RouterConfig(NAMES[made.hidden.dtype], weight, lane_experts_of(experts), 1 if tokens == 1 else 8)
    launched(kernels.RouterKernel, config, ROUTER, given, machine, run_on)
    assert bool((machine.get(workspace, (words,), torch.int32) == -1).all())  # as the next launch wants it
    shape = tokens, made.routing.top_k
    return machine.get(results["ids"], shape, torch.int32), machine.get(results["weights"], shape, FP32)


def select(logits: torch.Tensor, made: Case, run_on: Any) -> tuple[torch.Tensor, torch.Tensor]:
    machine = RouterMachine()
    given, results = chosen(made, machine)
    given["logits"] = SimpleNamespace(shape=tuple(logits.shape), address=machine.put(logits))
    config = RouterConfig(NAMES[made.hidden.dtype], LOGITS, lane_experts_of(logits.shape[1]))
    launched(kernels.SelectKernel, config, SELECT, given, machine, run_on)
    shape = len(logits), made.routing.top_k
    return machine.get(results["ids"], shape, torch.int32), machine.get(results["weights"], shape, FP32)


def select_alone(logits: torch.Tensor, routing: Routing, run_on: Any, correction: torch.Tensor | None = None) -> Any:
    made = Case(torch.zeros(len(logits), 8, dtype=BF16), torch.zeros(logits.shape[1], 8), routing, None, correction)
    return select(logits, made, run_on)


def check(found: tuple[torch.Tensor, ...], made: Case) -> None:
    ids, weights = select_reference(made.logits, made.routing, made.correction)
    assert torch.equal(found[0], ids)
    torch.testing.assert_close(found[1].double(), weights, rtol=1e-5, atol=1e-30)


ROUTINGS = {
    "mixtral": case(3, 8, Routing(2, renormalize=True)),
    "qwen3": case(1, 64, Routing(8, renormalize=True), k=264),
    "as it is": case(2, 36, Routing(4), dtype=FP16),
    "gpt-oss": case(2, 32, Routing(4, renormalize=True), bias=BF16),
    "deepseek": case(2, 48, Routing(8, "sigmoid", True, 2.5, 8, 4), weight=FP32, correction=FP32),
    "softplus": case(9, 13, Routing(6, "sqrtsoftplus", True, 1.5), bias=FP32, correction=BF16),
    "one": case(1, 9, Routing(1, "sigmoid"), k=8, bias=FP16, dtype=FP16),
    "odd groups": case(1, 35, Routing(5, "sigmoid", groups=7, kept_groups=2), correction=FP32),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_it_chooses_and_weighs_as_the_reference_in_fp64(name, run_on):
    check(run(ROUTINGS[name], run_on), ROUTINGS[name])


def test_padding_has_no_experts_and_leaves_other_tokens_as_they_are(run_on):
    made = case(9, 13, Routing(4, renormalize=True))
    made.padding = torch.arange(9) % 3 == 1
    for found, whole in (
        (run(made, run_on), run(replace(made, padding=None), run_on)),
        (select(made.logits.float(), made, run_on), select(made.logits.float(), replace(made, padding=None), run_on)),
    ):
        assert torch.equal(found[0], whole[0].masked_fill(made.padding[:, None], -1))
        assert torch.equal(found[1], whole[1])


@pytest.mark.parametrize("expert_shift", [0, 1, 2])
def test_how_many_experts_a_cta_has_changes_no_choice(expert_shift, run_on):
    made = case(2, 6, Routing(3, renormalize=True), k=520)
    check(run(made, run_on, expert_shift=expert_shift), made)


def test_a_token_gets_the_same_bits_whatever_others_there_are(run_on):
    made = case(9, 6, Routing(4), k=136)
    _, weights = run(made, run_on)
    for token in (0, 8):
        alone = Case(made.hidden[token : token + 1], made.weight, made.routing)
        assert torch.equal(run(alone, run_on)[1][0], weights[token])


@pytest.mark.parametrize("experts, top_k, scoring", [(8, 8, "sigmoid"), (33, 16, "softmax"), (512, 8, "sqrtsoftplus")])
def test_experts_are_chosen_by_logits_that_a_product_left(experts, top_k, scoring, run_on):
    logits = 3 * noise(2, experts, seed=experts)
    routing = Routing(top_k, scoring, renormalize=experts % 2 == 0, scale=2.5)
    ids, weights = select_alone(logits, routing, run_on)
    wanted_ids, wanted = select_reference(logits.double(), routing)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=0)


def test_equal_experts_rank_by_their_index_and_nan_above_all(run_on):
    nan, inf = torch.nan, torch.inf
    rows = torch.full((4, 70), -2.0)
    rows[0, [3, 35, 67, 4]] = torch.tensor([1.0, 1.0, 1.0, 2.0])
    rows[1, [64, 5, 37, 66]] = torch.tensor([nan, inf, nan, -inf])
    rows[1, 6] = -torch.tensor(nan)
    rows[2] = -inf
    rows[3, ::2] = -0.0
    rows[3, 1::2] = 0.0
    ids, weights = select_alone(rows, Routing(5, "sigmoid"), run_on)
    assert ids.tolist() == [[4, 3, 35, 67, 0], [6, 37, 64, 5, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    torch.testing.assert_close(weights, select_reference(rows, Routing(5, "sigmoid"))[1], equal_nan=True)
    ids, weights = select_alone(rows, Routing(5, renormalize=True), run_on)
    assert ids.tolist() == [[4, 3, 35, 67, 0], [6, 37, 64, 5, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    want = select_reference(rows, Routing(5, renormalize=True))[1]
    torch.testing.assert_close(weights, want, equal_nan=True)


def test_groups_with_equal_sums_rank_by_their_index(run_on):
    scores = torch.zeros(1, 12)
    correction = torch.tensor([0, 1, 2, 0, 3, 0, 1, 2, 0, 2, 1, 0]).float()
    ids, _ = select_alone(scores, Routing(4, "sigmoid", groups=4, kept_groups=2), run_on, correction)
    assert ids.tolist() == [[4, 2, 1, 0]]  # sums of 3, 3, 3, 3


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores_hold_over_the_whole_range_of_logits(scoring, run_on):
    logits = torch.cat((torch.tensor([-80.0, 80.0, -30.0, 30.0, -1e-3, 1e-3, 0.0]), torch.linspace(-12, 12, 25)))[None]
    ids, weights = select_alone(logits, Routing(32, scoring), run_on)
    wanted_ids, wanted = select_reference(logits.double(), Routing(32, scoring))
    if scoring == "softmax":
        assert torch.equal(ids, wanted_ids)
    got = torch.zeros(1, 32, dtype=torch.float64).scatter_(1, ids.long(), weights.double())
    want = torch.zeros_like(got).scatter_(1, wanted_ids.long(), wanted)
    torch.testing.assert_close(got, want, rtol=2e-5 if scoring != "sqrtsoftplus" else 5e-6, atol=1e-37)


def test_scores_that_are_all_0_get_weights_of_0(run_on):
    _, weights = select_alone(torch.full((1, 8), -1e4), Routing(2, "sigmoid", renormalize=True), run_on)
    assert weights.tolist() == [[0.0, 0.0]]
