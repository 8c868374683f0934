"""Runs the tests of `KvFormatTests` for each form of a subclass, at each head_dim that it lists or that is read."""

import pytest

from tests.formats.generic import KvFormatTests, head_dims_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is None or not issubclass(metafunc.cls, KvFormatTests) or "form" not in metafunc.fixturenames:
        return
    cases = [
        pytest.param(form, head_dim, id=f"{form.name}-d{head_dim}")
        for form in metafunc.cls.forms
        for head_dim in metafunc.cls.head_dims or head_dims_of(form)
    ]
    metafunc.parametrize(("form", "head_dim"), cases)
