"""A test of many values in one item fails as one of many items would."""

from __future__ import annotations

import pytest

from tests.each import each


@each("number", range(3))
def test_fixtures_come_beside_the_values(tmp_path, number: int):
    (tmp_path / str(number)).touch()
    assert len(list(tmp_path.iterdir())) == number + 1


def test_all_values_are_tried_and_those_that_fail_are_named():
    tried = []

    @each("number", range(5), ids=lambda number: f"n{number}")
    def check(number: int) -> None:
        tried.append(number)
        assert number % 2 == 0, f"{number} is odd"

    with pytest.raises(AssertionError, match="2 of 5 fail: n1, n3\n1 is odd") as error:
        check()
    assert tried == list(range(5)) and isinstance(error.value.__cause__, AssertionError)


def test_an_error_is_a_failure():
    @each("number", [1])
    def check(number: int) -> None:
        raise KeyError(number)

    with pytest.raises(AssertionError, match="1 of 1 fail: 1"):
        check()


def test_a_value_of_several_arguments_is_a_tuple_and_products_are_nested():
    tried = []

    @each("a, b", [(1, 2), (3, 4)])
    @each("c", [5, 6])
    def check(a: int, b: int, c: int) -> None:
        tried.append((a, b, c))
        assert (b, c) != (4, 5)

    with pytest.raises(AssertionError, match=r"1 of 2 fail: \(3, 4\)\n1 of 2 fail: 5"):
        check()
    assert tried == [(1, 2, 5), (1, 2, 6), (3, 4, 5), (3, 4, 6)]


def test_values_that_take_long_to_make_are_made_where_the_test_runs():
    made = []

    @each("number", lambda: made or made.append(1) or made)
    def check(number: int) -> None:
        assert number == 1

    assert not made
    check()
    assert made == [1]
    with pytest.raises(ValueError, match="number: got no values"):
        each("number", list)(lambda number: None)()


def test_no_values_and_no_such_argument_are_refused():
    with pytest.raises(ValueError, match="number: got no values"):
        each("number", [])
    with pytest.raises(AssertionError, match="check takes no number"):

        @each("number", [1])
        def check() -> None: ...
