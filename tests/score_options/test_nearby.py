"""A score option in one file that hides keys: scores times a number of each query head, of the nearest `REACH` keys.

Its `reach` has decode and extend attention leave out tiles, as a window's does.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.device.loads import load_float

pytest.importorskip("cutlass", reason="the option's device code is written in nvidia-cutlass-dsl")

from cutlass import Int64

from cute_kernels.formats.scores import KeyBlock, OptionTensor, ScoreOption, register
from cute_kernels.formats.scores.terms import ScoreTerm
from tests.attention.cases import make_call
from tests.score_options.generic import ScoreOptionTests, expected, extended, with_option

REACH = 200  # keys that a query sees, itself included


class NearbyTerm(ScoreTerm):
    """Keeps the number of each of a lane's queries."""

    changes_scores = True

    def open(self, state, work, query, softmax_scale):
        return load_float(state.values.tensors["nearby_gain"] + Int64(query.head) * 4)

    def change(self, state, kept, place, x, token):
        return x * kept

    def reach(self, values, queries):
        return REACH + (queries - 1)

    def may_hide(self, state, token):
        return token < state.length - REACH

    def hides(self, state, position, token):
        return token <= position - REACH


class Nearby(ScoreOption):
    """nearby_gain[head] times the score; keys from `REACH` back on are not seen."""

    name, term = "nearby", f"{__name__}:NearbyTerm"
    tensors = (OptionTensor("nearby_gain", ("num_q_heads",)),)

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        gain = block.by_head(block.call.score_tensors["nearby_gain"], scores.dtype)
        return (gain * scores).masked_fill(block.distances <= -REACH, -torch.inf)


NEARBY = register(Nearby())


class TestNearby(ScoreOptionTests):
    option = NEARBY


@pytest.mark.parametrize("page_size", [None, 16])
def test_keys_far_back_are_not_seen(page_size):
    made = make_call("bf16", (500, 201, 3), num_kv_heads=2, group=2, head_dim=64, q_len=3, page_size=page_size)
    call = with_option(NEARBY, made)
    gain = call.options["score_options"]["nearby_gain"].double()

    def seen(b, i, h, scores, keys_at, position):
        return (gain[h] * scores).masked_fill(position - keys_at >= REACH, -torch.inf)

    out = call.run()
    if page_size is None:  # what `expected` reads
        torch.testing.assert_close(out.double(), expected(call, seen), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(extended(call)[0].view_as(out), out, atol=1e-2, rtol=1e-2)
