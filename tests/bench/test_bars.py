"""Bars: every one that the run has figures for is judged, against figures of the same run."""

from bench.bars import judge


def verdicts(record):
    return {verdict.what: verdict for verdict in judge(record)}


def test_each_kind_of_bar_is_judged(record):
    found = verdicts(record)
    row = "T=8192 HQ=8 HKV=1 D=128"
    assert found[f"int4_g1 B=1 {row}: time"].met
    assert not found[f"int4_g1 B=512 {row}: ratio to the floor"].met  # 140 / 127 = 1.102, bar 1.10
    assert found[f"bf16 B=512 {row}: time over SDPA cudnn's"].met
    assert found[f"int4_g1 B=512 {row}: speed-up over the best BF16"].met  # 470 / 140
    assert not found[f"int4_g4 B=512 {row}: speed-up over the best BF16"].met  # 470 / 170
    assert found["int4_g1 B=16 T=131072 HQ=8 HKV=1 D=128: ratio to the floor"].met  # 1.17, bar 1.25
    assert found["host cost of one eager call"].met


def test_the_speed_up_is_over_the_fastest_bf16_of_the_run_whoever_made_it(record):
    record["rows"][0]["peers"]["SDPA cudnn"]["us"] = 400.0
    found = verdicts(record)
    assert abs(found["int4_g1 B=512 T=8192 HQ=8 HKV=1 D=128: speed-up over the best BF16"].measured - 400 / 140) < 1e-9
    assert not found["bf16 B=512 T=8192 HQ=8 HKV=1 D=128: time over SDPA cudnn's"].met


def test_what_was_not_measured_is_not_judged(record):
    del record["rows"][1]["us"]
    del record["host_us"]
    assert not [what for what in verdicts(record) if "B=1 " in what or "host" in what]
    assert judge({"rows": []}) == []


def test_a_bar_reads_as_a_sentence(record):
    met = [verdict.as_dict() for verdict in judge(record)]
    assert {"what", "measured", "bar", "met"} == set(met[0])
    assert any(entry["bar"] == ">= 3.2 x" for entry in met) and any(entry["bar"] == "<= 9 us" for entry in met)
