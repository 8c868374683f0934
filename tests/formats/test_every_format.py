"""What holds for a format from elsewhere holds for those that ship, and `register` refuses what would not work."""

from __future__ import annotations

import dataclasses

import pytest

from cute_kernels.formats import kv as kv_formats
from cute_kernels.formats.kv import ALIASES, FORMATS, KvFormat, format_of, register, registry
from layouts.kv.int4 import Int4Row
from tests.formats.generic import KvFormatTests


class TestShippedFormats(KvFormatTests):
    forms = tuple(FORMATS.values())
    head_dims = (128,)
    compiles = False


def test_shipped_formats_need_no_module_from_elsewhere():
    assert kv_formats.modules_of(*FORMATS, *ALIASES) == ()


def test_every_place_of_device_code_has_a_class():
    pytest.importorskip("cutlass")
    for form in FORMATS.values():
        for place in form.places():
            assert isinstance(kv_formats.load_code(place), type), place


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("int4_g1", {"num_groups": 2, "header_bytes": 8}, "name: got 'int4_g1', which is the name of another format"),
        ("int4", {}, "name: got 'int4', which is the name of another format"),
        ("int4 mine", {}, "name: got 'int4 mine', want a C identifier"),
        ("mine", {"header_bytes": 2}, "header_bytes: got 2, want 0 or 4 for each of 1 groups"),
        ("mine", {"given_scale": "row"}, "given_scale: got 'row'"),
        ("mine", {"given_scale": "head"}, "given_scale: got 'head' with 4 header_bytes"),
        ("mine", {"make_row": None}, "make_row: want what makes rows of u4 codes"),
        ("mine", {"code_bits": 6}, "make_row: got 36 bytes at head_dim 64, want 52: 4 bytes in front of 64 codes"),
        ("mine", {"make_row": lambda head_dim: Int4Row(head_dim, 2)}, "make_row: got 40 bytes at head_dim 64, want 36"),
    ],
)
def test_formats_that_cannot_be_are_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        register(dataclasses.replace(format_of("int4_g1"), name=name, **changes))
    assert name in (*FORMATS, *ALIASES) or name not in registry._registered


def test_an_equal_format_may_be_registered_again_and_another_of_its_name_not():
    mine = dataclasses.replace(format_of("int4_g1"), name="test_again")
    assert register(mine) is register(dataclasses.replace(mine)) is format_of("test_again")
    with pytest.raises(ValueError, match="test_again"):
        register(dataclasses.replace(mine, code_max=3.0))


def test_an_unknown_name_is_refused_with_those_that_are_known():
    register(dataclasses.replace(format_of("int4_g1"), name="test_listed"))
    with pytest.raises(ValueError, match="got 'int3', want one of .*int4_g1.*test_listed.*int4"):
        format_of("int3")
    with pytest.raises(TypeError, match="want the name of a format"):
        format_of(["int4"])  # pyright: ignore[reportArgumentType]


def test_a_format_is_a_value():
    first, second = format_of("int8_g4"), format_of("int4_g4")
    assert first == dataclasses.replace(first) and hash(first) == hash(dataclasses.replace(first))
    assert first != second and isinstance(first, KvFormat)
