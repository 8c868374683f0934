"""The pictures of kernels show roles, memory and barriers that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import kernel_figures
from tools.kernel_drawing import Figure, defined_names

PACKAGE = Path(__file__).resolve().parent.parent / "cute_kernels"
DESIGN = PACKAGE.parent / "docs/design"


@pytest.mark.parametrize("figure", kernel_figures.FIGURES, ids=lambda figure: figure.name)
def test_what_a_picture_names_is_in_the_code(figure: Figure):
    for code in figure.codes():
        file, _, name = code.partition(":")
        assert name in defined_names(PACKAGE / file), code
    shown = {box.name for lane in figure.lanes for box in lane.boxes}
    assert all({arrow.source, arrow.target} <= shown for arrow in figure.arrows)


@pytest.mark.parametrize("figure", kernel_figures.FIGURES, ids=lambda figure: figure.name)
def test_a_picture_is_what_its_data_draws_and_stands_on_a_design_page(figure: Figure):
    path = kernel_figures.path_of(figure)
    assert path.read_text() == kernel_figures.draw(figure), "want `python -m tools.kernel_figures`"
    assert any(f"figures/{path.name})" in page.read_text() for page in DESIGN.glob("*.md")), path.name


def test_a_pictures_numbered_barriers_have_the_numbers_of_the_code():
    """ "BEGIN (8)" and "FIRST_TURN (3, 4)": the constant's value, where it is a plain number."""
    checked = 0
    for figure in kernel_figures.FIGURES:
        for barrier in figure.barriers:
            numbers = re.findall(r"([A-Z_]+) \((\d+)", barrier.name)
            sources = "".join((PACKAGE / code.partition(":")[0]).read_text() for code in barrier.code)
            for name, number in numbers:
                if found := re.search(rf"^{name} = (\d+)", sources, re.MULTILINE):
                    assert found[1] == number, (figure.name, name)
                    checked += 1
    assert checked >= 3
