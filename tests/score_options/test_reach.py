"""Which keys no query of a request sees, as its score options say it: where both attentions begin to read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cute_kernels.attention.problem import AttentionProblem

pytest.importorskip("cutlass", reason="the options' device code is written in nvidia-cutlass-dsl")

from cute_kernels.attention.assignment import Assigner
from cute_kernels.attention.extend_schedule import choose
from cute_kernels.attention.work_tiles import Worker
from cute_kernels.formats.scores.features import Features
from cute_kernels.formats.scores.terms import ScoreTerms
from simulator import PlainThread, stand_in
from tests.each import each
from tests.score_options.test_nearby import REACH


@pytest.mark.parametrize("queries", [1, 5])
def test_the_shortest_reach_is_that_of_all_options(queries, run_on):
    """Of a window and an option that hide keys, whichever sees fewer decides which tiles are left out."""
    run_on(PlainThread())
    for features, window, reach in (
        (Features(), 9, None),
        (Features(window=True), 9, 9),
        (Features(terms=("nearby",)), 9, REACH),
        (Features(window=True, terms=("nearby",)), 9, 9),
        (Features(window=True, terms=("nearby",)), 1000, REACH),
    ):
        found = ScoreTerms(features, 2).reach(stand_in(SimpleNamespace(window=window)), queries)
        assert found == (None if reach is None else reach + queries - 1)


class Whole:
    """Divides as `Divisor` does."""

    def __init__(self, value: int) -> None:
        self.value = value

    def divide_int(self, number: int) -> tuple[int, int]:
        return divmod(number, self.value)


@each("features", [Features(causal=True, window=True), Features(causal=True, terms=("nearby",))])
@each("length", [5, 100, 199, 200, 201, 202, 263, 264, 265, 266, 1000])
@each("q_len", [1, 3, 5])
def test_attention_begins_at_the_first_key_that_a_query_sees(features, length, q_len, run_on):
    run_on(PlainThread())
    tile, terms = 64, ScoreTerms(features, 2)
    first = min(key for key in range(length) for query in range(length - q_len, length) if query - REACH < key <= query)
    values = stand_in(SimpleNamespace(window=REACH))
    requests = stand_in(SimpleNamespace(seen=terms.reach(values, q_len)))
    assert Assigner(tile).first_tile(requests, length) == first // tile

    config = choose(AttentionProblem.ragged(128, "bf16", "bf16", "bf16", 0, features))
    shape = stand_in(SimpleNamespace(window=REACH, group=Whole(1), splits=Whole(1)))
    work = stand_in(SimpleNamespace(first_row=0, num_rows=q_len, before=length - q_len, kv_stop=length, split=0))
    worker = Worker(config, terms)
    assert worker.first_valid(shape, work) == first
    span = worker.span(shape, work)
    assert (span.begin, span.end) == (first // config.tile_tokens, -(-length // config.tile_tokens))


@pytest.mark.parametrize("features", [Features(causal=True), Features(causal=True, soft_cap=True, sinks=True)])
def test_without_an_option_that_hides_keys_all_are_read(features, run_on):
    run_on(PlainThread())
    terms = ScoreTerms(features, 2)
    reach = terms.reach(stand_in(SimpleNamespace(window=REACH)), 3)
    assert reach is None and Assigner(64).first_tile(stand_in(SimpleNamespace(seen=reach)), 1000) == 0
