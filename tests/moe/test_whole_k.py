"""Whatever chooses the layout of a product of experts, its k blocks are all of the padded K."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from cute_kernels.formats.weights import integers
from cute_kernels.formats.weights.integers import IntegerFormat
from cute_kernels.gemm.experts.choice import GroupedLayout, chosen
from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.weight import padded_shape
from tests.moe.candidates import candidates

GPU = "NVIDIA H200"
KS = (8, 136, 320, 504, 520, 576, 768, 2112)
FORMS = [integers(*one) for one in product((4, 8), (None, 32, 64, 128, 256), (False, True))]


def layouts_of(problem: GroupedProblem) -> Iterator[GroupedLayout]:
    yield from candidates(problem)
    yield chosen(problem)
    parts = ranges.make_parts(problem)
    if parts is not None:
        yield parts


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key)
def test_every_layout_has_all_of_k(form: IntegerFormat):
    for k, places, invariant in product(KS, (2, 17, 512), (False, True)):
        k_pad = padded_shape((200, k), form.group_size)[1]
        problem = GroupedProblem(places, 8, 200, k, k_pad, form, "bf16", batch_invariant=invariant)
        for layout in layouts_of(problem):
            parts = layout.parts if isinstance(layout, RangeLayout) else 1
            halves = 2 * layout.k_blocks * parts - (
                isinstance(layout, RangeLayout) and layout.config.activations.half_last
            )
            assert halves * layout.config.block_k == 2 * k_pad, (problem, layout)
