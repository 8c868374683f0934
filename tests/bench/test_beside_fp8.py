"""`python -m bench accuracy --beside-fp8` on a small model with random weights."""

import json

import pytest
import torch

from bench import beside_fp8, beside_fp8_report, smollm2
from bench.beside_fp8 import Branch, Case
from bench.model_accuracy import Prepared, Way
from bench.record import Recorder
from tests.integrations.architectures import DECODERS, VOCABULARY


class Words:
    """A tokenizer: a token for each character."""

    def __call__(self, text):
        return {"input_ids": [2 + ord(char) % (VOCABULARY - 2) for char in text]}


def make_case(*lengths):
    draw = torch.randint(2, VOCABULARY, (30 + sum(lengths),)).split([30, *lengths])
    return Case(draw[0], tuple(Branch("next", part, len(part) - 1) for part in draw[1:]))


def test_branches_go_on_from_the_text_and_see_nothing_of_each_other():
    model, case = DECODERS["llama"].build(torch.float32), make_case(5, 3)
    exact = Prepared(Way("fp32", "fp32"))
    with pytest.raises(ValueError, match="fp32"):  # no format: bf16 is what a cache is beside
        list(beside_fp8.distributions(model, case, [exact]))
    (found,) = beside_fp8.distributions(model, case, [Prepared(Way("bf16", "bf16"))])
    for branch, got in zip(case.branches, found, strict=True):
        with torch.no_grad():
            alone = model(torch.cat((case.text, branch.tokens))[None]).logits[0, -branch.scored - 1 : -1]
        torch.testing.assert_close(got, alone.log_softmax(-1), rtol=0, atol=0.02)


def test_every_way_reads_the_same_text_again():
    model, case = DECODERS["llama"].build(torch.float32), make_case(4)
    ways = [Prepared(Way(name, name)) for name in ("bf16", "int4_g1", "bf16")]
    first, coarse, again = ([x.clone() for x in found] for found in beside_fp8.distributions(model, case, ways))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], coarse[0])


def test_needles_lie_in_the_text_and_are_asked_for_behind_it():
    text = torch.arange(2, 60).repeat(20)
    case = beside_fp8.case_of(Words(), text, 50, 4, seed=1)
    assert len(case.text) + 50 == len(text) and torch.equal(case.branches[0].tokens, text[-50:])
    places = []
    for branch in case.branches[1:]:
        answer = branch.tokens[-branch.scored :]
        windows = case.text.unfold(0, len(answer), 1)
        places.append(int(torch.where((windows == answer).all(1))[0][0]))
    assert places == sorted(places) and [one.kind for one in case.branches[1:]] == ["word", "number"] * 2


def test_figures_are_of_all_tokens_and_of_the_needles_that_the_reference_finds():
    told = beside_fp8.figures(
        [
            {"kind": "next", "kl": 3.0, "agreed": 8, "tokens": 10},
            {"kind": "next", "kl": 1.0, "agreed": 10, "tokens": 10},
            {"kind": "word", "expected": True, "found": False},
            {"kind": "word", "expected": True, "found": True},
            {"kind": "word", "expected": False, "found": True},
        ]
    )
    assert told["kl"] == pytest.approx(0.2) and told["agreement"] == pytest.approx(0.9)
    assert told["word"] == {"found": 1, "of": 2, "asked": 3}


@pytest.mark.parametrize(
    ("agreement", "kl", "keeps"), [(0.98, 0.02, True), (0.9702, 0.01, True), (0.97, 0.01, False), (0.99, 0.021, False)]
)
def test_a_row_keeps_the_answers_at_99_percent_of_fp8s_agreement_and_twice_its_kl(agreement, kl, keeps):
    fp8 = {"2048": {"agreement": 0.98, "kl": 0.01}}
    assert beside_fp8.keeps_answers({"2048": {"agreement": agreement, "kl": kl}}, fp8, ["2048"]) is keeps


def test_every_way_is_measured_on_every_group_and_judged(tmp_path):
    path, model = tmp_path / "record.json", DECODERS["llama"].build(torch.float32)
    recorder = Recorder(path, kind="beside_fp8")
    windows = torch.randint(2, VOCABULARY, (2, 64))
    text = smollm2.Text(windows, windows, torch.randint(2, VOCABULARY, (400,)), {})
    beside_fp8.measure(recorder, beside_fp8.QUICK, model, Words(), text, lambda _: None)
    record = json.loads(path.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["bf16"]["96"]["kl"] == 0 and rows["bf16"]["keeps_answers"] and len(rows) == 3
    assert 0 < rows[beside_fp8.FP8.name]["turn"]["kl"] < 0.1
    table = beside_fp8_report.markdown(record)
    assert "| e4m3_tensor, calibrated scale | 50 |" in table and "at 96: KL" in table
    assert "int8_token_head" in beside_fp8_report.text(record)
