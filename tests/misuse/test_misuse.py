"""Whatever comes, a public function takes it or says in one form which argument is wrong, what came and what is wanted.

One argument of a right call is made wrong at a time. What functions with a meaning of their own say about their own
mistakes is tested beside them; here it is that nothing else ever comes out: no AttributeError from within, no error of
a library below, no message that leaves the argument unsaid.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

import cute_kernels
from cute_kernels import arguments
from cute_kernels.runtime.device import device_of
from cute_kernels.runtime.gpu import Gpu, standing_in
from tests.misuse.calls import CALLS, Call
from tests.misuse.mistakes import mistakes, wrong_kinds

FORM = re.compile(r"^[\w.]+: .*\b(got|is)\b.*\bwant", re.DOTALL)
WRITTEN = ("out", "residual_out", "q_out", "k_cache", "v_cache", "cache", "k_tail", "q_shift")
UNUSED = {("flash_mla_sparse", "block_table"), ("flash_mla_sparse", "cache_seqlens")}  # by this call, so not looked at
UNUSED.add(("given_codes", "second"))  # which may be a number, too
TESTED_APART = {"OutOfPagesError", "UnsupportedGPUError", "QuantizedMoE", "__version__", "merge_over_ranks"}


def refusal(call: Call, argument: str, wrong: Any) -> str | None:
    """What the call says of a wrong argument, None if it takes it.

    Tensors serve all calls of a test: what some of them write is nothing that another one could be refused for. Other
    objects are copied, since FlashMLA's metadata remember what they were first used with.
    """
    function, given = call
    copies = {each: value if isinstance(value, torch.Tensor) else copy.copy(value) for each, value in given.items()}
    try:
        function(**(copies | {argument: wrong}))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {'nested' if value.is_nested else list(value.shape)}"


@pytest.mark.parametrize("name", CALLS)
def test_the_call_itself_is_right(name):
    function, given = CALLS[name]()
    function(**given)


@pytest.mark.parametrize("name", CALLS)
def test_what_can_be_no_such_argument_is_refused_by_its_name(name):
    call = CALLS[name]()
    for argument, value in call[1].items():
        if value is None or isinstance(value, bool) or (name, argument) in UNUSED:
            continue
        for wrong in wrong_kinds(value):
            said = refusal(call, argument, wrong)
            assert said is not None, f"{argument}: {shown(wrong)} was taken"
            assert said.startswith(f"{argument}: ") and FORM.match(said), f"{argument}: {shown(wrong)}: {said}"


@pytest.mark.parametrize("name", CALLS)
def test_other_mistakes_are_taken_or_refused_in_one_form_and_nothing_is_written_then(name):
    call = CALLS[name]()
    results = [tensor for key in WRITTEN if isinstance(tensor := call[1].get(key), torch.Tensor)]
    before = [tensor.clone() for tensor in results]
    for argument, value in call[1].items():
        for wrong in mistakes(value):
            said = refusal(call, argument, wrong)
            assert said is None or FORM.match(said), f"{argument}: {shown(wrong)}: {said}"
            for tensor, kept in zip(results, before, strict=True):
                same = said is None or torch.equal(tensor.view(torch.uint8), kept.view(torch.uint8))
                assert same, f"{argument}: {shown(wrong)}: written, and then {said}"
                tensor.copy_(kept)


def test_every_public_function_is_among_the_calls():
    called = {make()[0] for make in CALLS.values()}
    missing = {name for name in cute_kernels.__all__ if getattr(cute_kernels, name) not in called} - TESTED_APART
    assert not missing


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("nonsense", ValueError, "device: got 'nonsense', want None or a device such as"),
        ("", ValueError, "device: got '', want"),
        (1.5, TypeError, "device: got 1.5, want None, a torch.device or its name"),
        (True, TypeError, "device: got True, want"),
    ],
)
def test_a_device_that_is_none(device, error, words):
    with pytest.raises(error, match=words):
        device_of(device)


def test_a_device_that_is_one():
    assert device_of(None) is None
    for one in ("cpu", "meta", torch.device("cpu", 0)):
        assert device_of(one) == torch.device(one)


@pytest.mark.parametrize(("count", "there"), [(0, "cpu"), (2, "cpu, cuda:0, cuda:1")])
def test_a_device_that_is_not_here(count, there):
    with standing_in(Gpu(count=lambda: count)):
        for one in ("cuda:2", torch.device("cuda", 2), *(["cuda"] if not count else [])):
            wanted = f"^device: got '{one}', want one of the devices that torch finds here: {there}$"
            with pytest.raises(ValueError, match=wanted):
                device_of(one)
        if count:
            here = torch.device("cuda", 1)
            assert device_of("cuda:1") == device_of(here) == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("bounds", "value", "said"),
    [
        ((1,), 0, "count: got 0, want at least 1"),
        ((1,), 10**40, f"count: got {10**40}, want 1 to {2**63 - 1}"),
        ((1, 8), 9, "count: got 9, want 1 to 8"),
        ((1, 8), -1, "count: got -1, want 1 to 8"),
    ],
)
def test_a_number_that_counts_nothing(bounds, value, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        arguments.check_count("count", value, *bounds)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), 10**400])
def test_a_number_that_is_no_positive_finite_one(value):
    with pytest.raises(ValueError, match=f"^number: got {value}, want a positive finite number$"):
        arguments.check_positive("number", value)
