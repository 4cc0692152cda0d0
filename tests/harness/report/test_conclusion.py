"""The sentences at the end of a run."""

from __future__ import annotations

from harness.report import conclusion, contents
from tests.support import record_factory as factory


def said(records):
    return list(conclusion.sentences(contents.build(records)))


def test_the_fastest_with_dp_and_its_price():
    seconds = {("pytorch", "eager", False): 1.0, ("dpcore", "engine", True): 1.5, ("opacus", "hooks", True): 3.0}
    records = [
        factory.record(framework=f, variant=v, private=private, seconds=[value], round=r)
        for r in range(3)
        for (f, v, private), value in seconds.items()
    ]
    title, sentence = said(records)
    assert title == "Fastest with DP:"
    assert "dpcore-engine, 1.50 s per epoch; 1.50 times that of pytorch-eager [1.50, 1.50], n = 3" in sentence


def test_no_interval_of_two_pairs_and_no_price_without_a_baseline():
    pairs = [
        factory.record(framework=f, variant=v, private=private, seconds=[1.0], round=r)
        for r in range(2)
        for f, v, private in (("pytorch", "eager", False), ("dpcore", "engine", True))
    ]
    assert said(pairs)[1].endswith("; 1.00 times that of pytorch-eager, n = 2")
    assert said([r for r in pairs if r.cell.private])[1].endswith("dpcore-engine, 1.00 s per epoch")


def test_what_was_disturbed_is_no_result_yet():
    told = said([factory.record(framework="dpcore", variant="engine", private=True, seconds=[1.0], disturbed=True)])
    assert "(disturbed)" in told[1] and "quiet machine" in told[2]


def test_without_private_times_nothing_is_said():
    assert said([factory.record(framework="pytorch", variant="eager", private=False, seconds=[1.0])]) == []
