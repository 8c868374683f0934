"""A score option in one file: keys at odd positions get a number of each query head more.

Nothing else in the repository knows of it. Registering it gives it decode attention on the CPU and the GPU;
`TestParity` gives it the tests that every option has. docs/add_score_option.md goes through it.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.device.loads import load_float

pytest.importorskip("cutlass", reason="the option's device code is written in nvidia-cutlass-dsl")

from cutlass import Float32, Int64

from cute_kernels.device import ptx
from cute_kernels.formats.scores import KeyBlock, OptionTensor, ScoreOption, register
from cute_kernels.formats.scores.terms import ScoreTerm
from tests.attention.cases import make_call
from tests.score_options.generic import ScoreOptionTests, expected, with_option


class ParityTerm(ScoreTerm):
    """Keeps the number of each of a lane's queries."""

    changes_scores = True

    def open(self, state, work, query, softmax_scale):
        return load_float(state.values.tensors["parity_weight"] + Int64(query.head) * 4) * ptx.LOG2_E

    def change(self, state, kept, place, x, token):
        return ptx.fma(Float32(token & 1), kept, x)


class Parity(ScoreOption):
    """parity_weight[head] more for keys at odd positions."""

    name, term = "parity", f"{__name__}:ParityTerm"
    tensors = (OptionTensor("parity_weight", ("num_q_heads",)),)

    def reference(self, scores: torch.Tensor, block: KeyBlock) -> torch.Tensor:
        weight = block.by_head(block.call.score_tensors["parity_weight"], scores.dtype)
        return scores + weight * (block.keys_at & 1).to(scores.dtype)


PARITY = register(Parity())


class TestParity(ScoreOptionTests):
    option = PARITY


def test_odd_keys_get_their_heads_number():
    call = with_option(PARITY, make_call("bf16", (37, 2, 20), num_kv_heads=2, group=2, head_dim=64, q_len=3))
    weight = call.options["score_options"]["parity_weight"].double()
    want = expected(call, lambda b, i, h, scores, keys_at, position: scores + weight[h] * (keys_at % 2))
    torch.testing.assert_close(call.run().double(), want, atol=1e-2, rtol=1e-2)


def test_an_option_is_registered_once_and_its_names_are_its_own():
    assert register(Parity()) is PARITY

    class Other(Parity):
        name = "other"

    class Taken(Parity):
        name = "soft_cap"
        tensors = ()

    class Unknown(Parity):
        name = "unknown"
        tensors = (OptionTensor("unknown_weight", ("heads",)),)

    with pytest.raises(ValueError, match="got 'parity_weight', want an identifier"):
        register(Other())
    with pytest.raises(ValueError, match="got 'soft_cap', want an identifier"):
        register(Taken())
    with pytest.raises(ValueError, match="got 'heads', want a number or one of batch"):
        register(Unknown())


def test_trees_have_no_registered_options():
    call = with_option(PARITY, make_call("bf16", (37,), num_kv_heads=1, group=2, q_len=2))
    with pytest.raises(ValueError, match="score_options: got parity_weight with a tree_mask"):
        call.run(tree_mask=torch.ones(1, 2, 1, dtype=torch.int32))
