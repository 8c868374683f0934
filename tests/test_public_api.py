"""What users may import says what it is: every public name has a docstring, functions one that names each argument."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

MODULES = (
    "cute_kernels",
    "cute_kernels.attention",
    "cute_kernels.compat.fbgemm",
    "cute_kernels.compat.flash_attn",
    "cute_kernels.compat.flash_mla",
    "cute_kernels.integrations.checkpoints",
    "cute_kernels.attention.extend",
    "cute_kernels.kv_cache",
    "cute_kernels.gemm",
    "cute_kernels.mla",
    "cute_kernels.mla.cache",
    "cute_kernels.gemm.experts",
    "cute_kernels.norm",
    "cute_kernels.norm",
    "cute_kernels.runtime",
    "layouts.kv",
)
INHERITED = {"forward", "extra_repr"}  # of nn.Module, which says what they are


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(module.__name__)
    ]


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Functions and properties that a class of this project defines itself."""
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
        if not name.startswith("_") and name not in INHERITED and inspect.isfunction(function):
            yield name, function


@pytest.mark.parametrize("module_name", MODULES)
def test_every_public_name_is_documented(module_name: str):
    module = importlib.import_module(module_name)
    bare = []
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value):
            bare += [] if value.__doc__ else [name]
            bare += [f"{name}.{each}" for each, function in members(value) if not inspect.getdoc(function)]
        elif inspect.isfunction(value) and not inspect.getdoc(value):
            bare.append(name)
    assert not bare, f"{module_name}: no docstring of {', '.join(bare)}"


NOUN = re.compile(r"[A-Z][a-z]*[^s\W] |\W|[a-z]|[A-Z]\w+s (of|in|per|that|whose)\b")
"""How a docstring begins that names a thing: "The pages of ...", "[tokens, hidden] of ...", "Bytes of ..."."""


@pytest.mark.parametrize(
    "module_name", (*MODULES, "cute_kernels.formats.kv", "cute_kernels.formats.weights", "layouts")
)
def test_the_docstring_of_a_function_begins_with_what_it_does(module_name: str):
    """A verb: "Returns the pages of a sequence." Properties and classes name a thing."""
    module = importlib.import_module(module_name)
    functions = {}
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value):
            own = {f"{name}.{each}": function for each, function in members(value)}
            functions |= {each: f for each, f in own.items() if not isinstance(vars(value)[f.__name__], property)}
        elif inspect.isfunction(value):
            functions[name] = value
    texts = {name: inspect.getdoc(function) or "" for name, function in functions.items()}
    found = {name: text.split("\n")[0] for name, text in texts.items() if NOUN.match(text)}
    assert not found, f"{module_name}: want a verb first: {found}"


@pytest.mark.parametrize("module_name", MODULES[:-2])  # those that take tensors
def test_the_docstring_of_a_function_names_its_arguments(module_name: str):
    module = importlib.import_module(module_name)
    unsaid = []
    for name in public_names(module):
        function = getattr(module, name)
        if not inspect.isfunction(function):
            continue
        text = inspect.getdoc(function) or ""
        unsaid += [
            f"{name}({parameter})"
            for parameter, what in inspect.signature(function).parameters.items()
            if what.kind not in (what.VAR_POSITIONAL, what.VAR_KEYWORD)
            and not re.search(rf"\b{re.escape(parameter)}\b", text)
        ]
    assert not unsaid, f"{module_name}: nothing is said of {', '.join(unsaid)}"


ENGINES = {"q_shift", "k_tail", "tail_slots", "unpack", "sm_margin", "norm_offset", "following"}
"""Parameters that an engine passes, not a reader's first call."""


def test_what_engines_pass_stands_in_a_block_of_its_own():
    places = {}
    for module in map(importlib.import_module, MODULES):
        for name in public_names(module):
            function = getattr(module, name)
            given = ENGINES & set(inspect.signature(function).parameters) if inspect.isfunction(function) else set()
            first, _, others = (inspect.getdoc(function) or "").partition("\nOther Parameters:\n")
            args = first.partition("\nArgs:\n")[2]
            for each in given:
                places[name, each] = (re.search(rf"\b{each}\b", args) is None, re.search(rf"\b{each}\b", others))
    assert len(places) > 8
    assert not [place for place, (not_among_args, said) in places.items() if not (not_among_args and said)]
