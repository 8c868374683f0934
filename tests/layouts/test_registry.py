"""The command line and its registry: everything listed is proved and can be drawn."""

import random
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from layouts import dsl
from layouts.__main__ import main, verify_entries
from layouts.draw import save, to_html, to_svg
from layouts.draw.figure import Cell, Figure, Panel, heat, hue
from layouts.proofs import METHODS, ProofError
from layouts.registry import Entry, entries
from layouts.transform import Transform, unpack
from tests.each import each
from tests.layouts.dsl_oracle import traced

ENTRIES = entries()
SVG = "{http://www.w3.org/2000/svg}"


@each("name", ENTRIES)
def test_every_entry_is_proved(name):
    proofs = ENTRIES[name].verify()
    assert proofs and all(proof.cases > 0 and proof.method in METHODS for proof in proofs)


@each("name", ENTRIES)
def test_every_entry_is_drawn(name):
    figure = ENTRIES[name].figure()
    root = ElementTree.fromstring(to_svg(figure))
    boxes = root.findall(f"{SVG}g[@class='box']")
    assert len(boxes) == sum(len(panel.cells) for panel in figure.panels) > 0
    assert boxes[0].find(f"{SVG}title") is not None
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rectangle in root.iter(f"{SVG}rect"):
        assert (
            0
            <= float(rectangle.attrib["x"])
            <= float(rectangle.attrib["x"]) + float(rectangle.attrib["width"])
            <= width
        )
        assert float(rectangle.attrib["y"]) + float(rectangle.attrib["height"]) <= height


def test_every_transform_is_what_the_dsl_makes_of_its_layout():
    """The DSL evaluates each source layout on the CPU; the bytes then move accordingly (and come back)."""
    transforms = [entry.subject for entry in ENTRIES.values() if isinstance(entry.subject, Transform)]
    samples = [random.Random(transform.name).sample(range(transform.size), 128) for transform in transforms]

    def body():
        layouts = [dsl.to_dsl(transform.source) for transform in transforms]
        return [[int(layout(i)) for i in chosen] for layout, chosen in zip(layouts, samples, strict=True)]

    for transform, chosen, wanted in zip(transforms, samples, traced(body), strict=True):
        x = torch.randint(0, 256, transform.storage_shape(transform.in_shape), dtype=torch.uint8)
        moved = unpack(transform(x).flatten(), transform.bits)
        assert torch.equal(moved[chosen], unpack(x.flatten(), transform.bits)[wanted] ^ transform.flip), transform.name


def test_the_registry_covers_every_kind():
    kinds = {entry.kind for entry in ENTRIES.values()}
    assert kinds == {
        "swizzles",
        "weight transforms",
        "fast conversions",
        "fragments",
        "shared-memory accesses",
        "weight tiles",
        "KV rows",
    }


def test_hover_facts_say_where_an_element_is():
    facts = ENTRIES["mma_a_m16n8k16"].figure().panels[0].cells[0].facts
    assert {"m": 0, "k": 0, "thread": 0, "value": 0}.items() <= facts.items()
    facts = ENTRIES["gqa_k_store"].figure().panels[0].cells[0].facts
    assert {"byte": 0, "bank": 0}.items() <= facts.items()


def test_html_is_one_file_that_loads_nothing():
    page = to_html(ENTRIES["u4_f16"].figure())
    assert "<script>" in page and "src=" not in page and "href=" not in page
    assert page.count("http") == 1, "only the SVG name space"


def test_text_is_escaped():
    figure = Figure("<b> & co", [Panel("p", [Cell(0, 0, "<i>", facts={"a": "<&>"})])])
    root = ElementTree.fromstring(to_svg(figure))
    assert "<i>" in [text.text for text in root.iter(f"{SVG}text")]


def test_colours_are_colours():
    assert all(len(hue(i, n)) == 7 for n in (4, 32) for i in range(n)) and len({hue(i, 32) for i in range(32)}) == 32
    assert heat(0, 4) != heat(1, 4) != heat(4, 4)


def test_list(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ENTRIES)


def test_verify_prints_what_was_proved_and_how(capsys):
    assert main(["verify", "fastertransformer_w4_sm80", "u4_f16"]) == 0
    out = capsys.readouterr().out
    assert "matrix" in out and "S1 of 4-bit weights + ldmatrix = fragments of mma_b_m16n8k16" in out
    assert "of 2 entries proved, 0 entries not proved" in out


def test_a_false_claim_fails_the_command(capsys):
    def wrong():
        raise ProofError("not so: two is three")

    broken = Entry("broken", "swizzles", None, "", wrong, lambda: Figure("", []))
    assert verify_entries([broken]) == 1
    assert "broken: NOT PROVED: not so: two is three" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_draw_writes_the_file(tmp_path, suffix):
    target = tmp_path / f"picture{suffix}"
    assert main(["draw", "swizzle_128b", "-o", str(target)]) == 0
    assert "swizzle_128b" in target.read_text(encoding="utf-8")


def test_draw_takes_a_layout(tmp_path):
    target = tmp_path / "layout.svg"
    assert main(["draw", "(4,8):(8,1)", "-o", str(target)]) == 0
    assert "(4,8):(8,1)" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "nothing"], "no entry is named nothing"),
        (["draw", "nothing", "-o", "x.svg"], "no entry is named nothing"),
        (["draw", "(4,8):", "-o", "x.svg"], "layout is '(4,8):'"),
        (["draw", "(65536,2):(2,1)", "-o", "x.svg"], "layout is '(65536,2):(2,1)'; want one of at most 65536 elements"),
        (["draw", "2:99999999999999999999", "-o", "x.svg"], "want one whose offsets fit 64 bits"),
        (["draw", "S<99,4,3> o 0 o 8:1", "-o", "x.svg"], "want one whose offsets fit 64 bits"),
        (["draw", "u4_f16", "-o", "x.png"], "ends in .svg or .html"),
        (["draw", "u4_f16", "-o", "nowhere/x.svg"], "nowhere/x.svg cannot be written: No such file or directory"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_save_returns_the_path(tmp_path):
    assert save(ENTRIES["e5m2"].figure(), tmp_path / "a.svg") == tmp_path / "a.svg"
