"""The way of a call: what is kept, what is checked when, which device a launch has, which function serves it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels import arguments, decode_attention
from cute_kernels.runtime.gpu import Gpu, standing_in
from cute_kernels.runtime.operator import Operator, Plan, launcher, route
from cute_kernels.runtime.plans import COPIED, key_function


def doubling(device_index: int, limit: int) -> Plan[[tuple[int, Any]], tuple[int, int]]:
    """A plan that doubles what it is given, if that is not beyond its limit."""

    def launch(call: tuple[int, Any]) -> tuple[int, int]:
        x, _ = call
        if x > limit:
            raise ValueError("the function refuses it in its own words")
        return 2 * x, device_index

    return Plan(device_index, launch)


class Family:
    """A launcher with a record of what it did."""

    def __init__(self, device_index: int = 0, always: Any = None):
        self.device_index = device_index
        self.checked: list[int] = []
        self.made: list[int] = []
        self.launches = launcher(self.key, self.check, self.make, lambda x: (0, x), always)

    def launcher(self, x: Any, y: Any = "") -> tuple[int, int]:
        return self.launches((x, y))

    def key(self, call: tuple[int, Any]) -> Any:
        x, y = call
        return x.bit_length(), y

    def check(self, call: tuple[Any, Any]) -> int:
        x, _ = call
        if not isinstance(x, int):
            raise TypeError(f"x: got {x!r}, want an int")
        if x > 100:
            raise ValueError(f"x: got {x}, want at most 100")
        self.checked.append(x)
        return x

    def make(self, x: int) -> Plan[[tuple[int, Any]], tuple[int, int]] | None:
        self.made.append(x)
        return doubling(self.device_index, limit=100) if x else None


@pytest.fixture(autouse=True)
def current_device():
    """The current device, as a list that may be changed; a guard changes it, too."""
    current = [0]

    class Guard:
        def __init__(self, index: int):
            self.index, self.before = index, current[0]

        def __enter__(self) -> None:
            current[0] = self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    with standing_in(Gpu(current=lambda: current[0], guard=Guard)):
        yield current


def test_a_call_like_an_earlier_one_is_neither_checked_nor_planned_again():
    family = Family()
    assert [family.launcher(x) for x in (5, 6, 7, 5)] == [(10, 0), (12, 0), (14, 0), (10, 0)]
    assert family.checked == family.made == [5]
    assert family.launcher(8)[0] == 16 and family.made == [5, 8]
    assert family.launcher(5, y="other")[0] == 10 and family.made == [5, 8, 5]


def test_calls_that_nothing_is_launched_for_are_checked_and_not_kept():
    family = Family()
    assert family.launcher(0) == (0, 0) and family.launcher(0) == (0, 0)
    assert family.checked == [0, 0] and not family.launches.plans


def test_a_refused_launch_is_explained_by_the_checks():
    family = Family()
    family.launcher(64)
    with pytest.raises(ValueError, match="x: got 120, want at most 100"):
        family.launcher(120)
    family.launches.plans[7, ""] = doubling(0, limit=70)
    with pytest.raises(ValueError, match="in its own words"):  # the checks find nothing
        family.launcher(80)


def test_an_argument_of_no_kind_is_explained_by_the_checks():
    with pytest.raises(TypeError, match="x: got None, want an int"):
        Family().launcher(None)
    with pytest.raises(TypeError, match="unhashable"):  # the checks find nothing
        Family().launcher(3, y=[])


def test_in_debug_mode_every_call_is_checked():
    family = Family()
    with arguments.checking_values():
        for x in (5, 6):
            family.launcher(x)
    assert family.checked == [5, 6] and family.made == [5]


def test_in_debug_mode_nothing_is_looked_at_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    for captures, checked in ((True, [5]), (False, [5, 5])):
        for name, answer in (("is_initialized", True), ("is_current_stream_capturing", captures)):
            monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
        family = Family()
        family.launcher(5)
        with arguments.checking_values():
            family.launcher(5)
            with arguments.checking_values(False):
                family.launcher(5)
        assert family.checked == checked


def test_what_a_key_cannot_hold_is_checked_in_every_call():
    family = Family(always=lambda call: call[0] == 6)
    for x in (5, 6, 7, 6):
        family.launcher(x)
    assert family.checked == [5, 6, 6] and family.made == [5]


def test_a_launch_has_its_plans_device_as_the_current_one(current_device):
    seen = []

    def looks(index: int) -> None:
        seen.append(current_device[0])

    look = launcher(lambda index: index, lambda index: index, lambda index: Plan(index, looks))
    look(0)
    look(3)
    assert seen == [0, 3] and current_device[0] == 0


def test_which_function_serves_a_call():
    def serves(**tensors: Any) -> str:
        return route(cuda=lambda: "cuda", cpu=lambda: "cpu", operator=lambda: "operator", **tensors)()

    x = torch.zeros(2)
    assert serves(x=x) == "cpu"
    assert serves(x=torch.nn.Parameter(x)) == "operator"
    assert serves(x=x.to("meta"), y=x.to("meta")) == "operator"
    with pytest.raises(ValueError, match="y: got a tensor on cpu, want it on meta, where x is"):
        serves(x=x.to("meta"), y=x)
    with pytest.raises(TypeError, match="y: got list, want a torch.Tensor"):
        serves(x=x, y=[1])


def test_an_operator_is_registered_for_tracing():
    def here(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    scaled = Operator(
        "test_scaled(Tensor x, float factor) -> Tensor",
        cpu=here,
        cuda=here,
        meta=lambda x, factor: x.new_empty(x.shape),
    )
    x = torch.ones(3)
    assert torch.equal(scaled(x, 2.0), torch.ops.cute_kernels.test_scaled(x, 2.0))
    torch.library.opcheck(torch.ops.cute_kernels.test_scaled.default, (x, 2.0))


@pytest.mark.parametrize("moved", ["q", "k_cache", "v_cache", "seq_lens", "sinks"])
def test_a_compiled_call_with_a_tensor_left_on_meta_is_refused_by_name(moved):
    """Torch calls the fake function alone there, and its result on the CPU is memory as it was found."""
    cache = torch.zeros(1, 16, 1, 64).bfloat16()
    given: dict[str, Any] = {"q": torch.zeros(1, 1, 2, 64).bfloat16(), "k_cache": cache, "v_cache": cache.clone()}
    given |= {"seq_lens": torch.ones(1, dtype=torch.int32), "sinks": torch.zeros(2)}
    given[moved] = given[moved].to("meta")
    call = torch.compile(functools.partial(decode_attention, kv_format="bf16"), backend="eager")
    with pytest.raises(RuntimeError, match=": got a tensor on (meta|cpu), want it on (meta|cpu), where q is"):
        call(**given)


# -- keys --------------------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    form: str


class Fields(NamedTuple):
    x: torch.Tensor
    weight: Weight
    scale: float = 1.0
    bias: torch.Tensor | None = None
    other: Weight | None = None
    flag: bool = False


def test_a_key_has_what_the_checks_read_of_each_field():
    key = key_function(Fields)
    x = torch.zeros(4, 8)
    given = Fields(x, Weight("w4"))
    alike = Fields(torch.ones(4, 8), Weight("w4"), True)  # True equals 1.0: numbers are compared, not their classes
    others = [{"x": x[:, ::2]}, {"x": x.half()}, {"x": torch.zeros(33)[1:].view(4, 8)}]
    others += [{"weight": Weight("w8")}, {"scale": 2.0}, {"bias": x[0]}, {"bias": x[:, 0]}, {"other": Weight("w4")}]
    keys = [key(given), *(key(given._replace(**other)) for other in others), key(given._replace(flag=True))]
    assert key(alike) == keys[0] and len(set(keys)) == len(keys)


def test_keys_refuse_a_number_for_a_flag_and_what_is_no_tensor():
    key = key_function(Fields, x=COPIED)
    assert key(Fields(torch.zeros(8, 4).T, Weight("w4"))) == key(Fields(torch.zeros(4, 8), Weight("w4")))
    for wrong in ({"flag": 1}, {"x": 3}, {"bias": "3"}, {"weight": None}):
        with pytest.raises((AttributeError, TypeError)):
            key(Fields(torch.zeros(4), Weight("w4"))._replace(**wrong))
