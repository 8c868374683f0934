"""A kernel's arguments are declared once; what is bound, looked up or given by name comes out in that order."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from cute_kernels.attention.arguments import decode_arguments
from cute_kernels.formats.scores.features import PLAIN, Features
from cute_kernels.kv_cache.arguments import append_arguments
from cute_kernels.runtime import native
from cute_kernels.runtime.launch_arguments import LaunchArguments, arguments, by_name, joined

FOUR = joined(arguments("tensor", "x"), arguments("address", "bias", "norm"), arguments("int32", "rows"))


def test_arguments_go_where_their_names_are_declared_however_they_are_given():
    x, bias = torch.zeros(1), torch.zeros(2)
    places = {"bias": ("given", "b"), "norm": ("given", "n")}
    send = FOUR.bound(lambda *given: given, {"rows": 7}, places)
    assert send(given={"n": None, "b": bias}, x=x) == (x, bias.data_ptr(), 0, 7)
    send = FOUR.bound(lambda *given: given, {"bias": 1}, values={"rows": ("numbers", 0), "norm": ("numbers", 1)})
    assert send(numbers=(3, 5), x=x) == (x, 1, 5, 3)


def test_a_tensor_may_come_by_the_name_of_its_argument():
    x, bias = torch.zeros(1), torch.zeros(2)
    send = FOUR.bound(lambda *given: given, {"rows": 7, "norm": 3}, by_name("bias"), ignored=("y",))
    assert send(bias=bias, x=x, y=bias) == (x, bias.data_ptr(), 3, 7)
    assert send(bias=None, x=x) == (x, 0, 3, 7)


@pytest.mark.parametrize(
    ("fixed", "tensors", "named"),
    [({"row": 1}, {}, "row"), ({"rows": 1}, {"rows": ("given", 0)}, "rows"), ({}, {"y": ("given", 0)}, "y")],
)
def test_what_is_said_of_no_argument_or_twice_is_named(fixed, tensors, named):
    with pytest.raises(
        TypeError, match=f"{named}: got an argument of that name, want each once of x, bias, norm, rows"
    ):
        FOUR.bound(print, fixed, tensors)


def test_a_name_stands_once():
    with pytest.raises(ValueError, match="arguments: got rows twice"):
        LaunchArguments((*FOUR.arguments, *arguments("int32", "rows")))


def test_a_launch_without_one_of_them_is_refused():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'norm'"):
        FOUR.bound(print, {"rows": 1})(x=None, bias=0)


@pytest.mark.skipif(native.dsl_version() is None, reason="fake arguments are nvidia-cutlass-dsl's")
def test_the_compiler_gets_the_declared_types_in_the_declared_order():
    import cutlass

    types = {"address": cutlass.Int64, "int64": cutlass.Int64, "int32": cutlass.Int32, "float32": cutlass.Float32}
    features = Features(soft_cap=True, shift=True)
    for declared in (decode_arguments(PLAIN, False), decode_arguments(features, True), append_arguments(True)):
        tensors = {argument.name: object() for argument in declared.arguments if argument.kind == "tensor"}
        for argument, value in zip(declared.arguments, declared.fake(tensors), strict=True):
            wanted = tensors.get(argument.name)
            assert value is wanted if wanted is not None else type(value) is types[argument.kind]
        entry = inspect.signature(declared.entry(lambda given, stream: None))
        assert list(entry.parameters) == [*declared.names, "stream"]
    with pytest.raises(TypeError, match=re.escape("tensors: got y, want x")):
        FOUR.fake({"y": object()})
