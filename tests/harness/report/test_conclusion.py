"""The sentences at the end of a run."""

from __future__ import annotations

import pytest

from harness.analysis.standing import standings
from harness.report import conclusion, contents, model
from harness.report import standings as words
from harness.report.chapters import fastest_peer, overview
from harness.report.formats import latex, markdown, page
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
    assert title == "Fastest with DP, by paired rounds:"
    lead = "; opacus-hooks, the next, takes 2.00 times as long [2.00, 2.00]"
    assert f"dpcore-engine, 1.50 s per epoch{lead}; 1.50 times that of pytorch-eager [1.50, 1.50], n = 3" in sentence


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


def first_sentence(seconds, disturbed=()):
    """The first sentence of the report of contestants with DP on one task. ``seconds``: contestant -> its rounds."""
    records = [
        factory.record(framework=name, variant="x", seconds=[value], round=r, disturbed=r in disturbed)
        for name, values in seconds.items()
        for r, value in enumerate(values)
    ]
    built = contents.build(records)
    told = list(conclusion.sentences(built))[1]
    return markdown.page(built).split("**")[1], told


def test_the_fastest_is_said_to_be_only_where_rounds_tell_it_from_every_other():
    apart, told = first_sentence({"a": [1.0, 1.02, 1.01], "b": [2.0, 2.1, 2.05], "c": [3.0, 3.1, 3.0]})
    assert apart == "With DP, a-x is the fastest on MNIST CNN." and "tell" not in told and "told" not in told
    # The third reaches lower than the second: it may be the fastest.
    wide, told = first_sentence({"a": [1.0, 1.02, 1.01], "b": [2.0, 2.1, 2.05], "c": [0.9, 9.0, 9.0]})
    assert wide.startswith("a-x and c-x cannot be told apart on MNIST CNN (time ratio 0.24 [") and "n = 3" in wide
    assert "a-x, 1.01 s per epoch; cannot be told from c-x (time ratio 0.24 [" in told


def test_tasks_whose_titles_hold_commas_are_set_apart():
    records = [
        factory.record(task=task, framework=name, variant="x", seconds=[second + r / 100], round=r)
        for task in ("mnist-cnn", "gpt2-lm", "vit")
        for name, second in (("a", 1.0), ("b", 2.0), ("c", 3.0))
        for r in range(3)
    ] + [factory.record(framework="a", variant="x", seconds=[1.0], task="imdb-lstm")]
    sentence = markdown.page(contents.build(records)).split("**")[1]
    assert "MNIST CNN; GPT-2, 4 layers of 128, from scratch on the Brown corpus and ViT, 4 layers" in sentence, sentence


@pytest.mark.parametrize(
    ("rounds", "disturbed", "why"), [(2, (), "n = 2)."), (3, (0, 1, 2), "n = 3, disturbed)."), (1, (), "n = 1).")]
)
def test_too_few_rounds_tell_nobody_from_anybody(rounds, disturbed, why):
    sentence, told = first_sentence({"a": [1.0] * rounds, "b": [2.0] * rounds}, disturbed)
    assert sentence == f"Too few undisturbed rounds to tell a-x from b-x on MNIST CNN (time ratio 0.50, {why}"
    assert f"too few undisturbed rounds to tell it from b-x (time ratio 0.50, {why[:-1]}" in told


def test_who_was_timed_alone_is_not_the_fastest_of_anything():
    assert first_sentence({"a": [1.0] * 5})[0] == "No other framework than that of a-x was timed with DP on MNIST CNN."


def test_every_format_names_the_same_first():
    """The median of b is smaller, for it lacks the slow rounds; in the rounds that both share a is faster."""
    seconds = {"a": [1.0, 1.0, 1.0, 3.0, 3.0, 3.0], "b": [1.1, 1.1, 1.1]}
    records = [
        factory.record(framework=name, variant="x", seconds=[value], round=r, private=name != "pytorch")
        for name, values in {**seconds, "pytorch": [0.9] * 6}.items()
        for r, value in enumerate(values)
    ]
    built = contents.build(records)
    tables = built.tables
    section = model.sections(tables)[0]
    (standing,) = standings(tables).values()
    assert standing.first == "a-x" and standing.runner_up.contestant == "b-x"
    assert overview.of(tables, section).sentence.startswith("With DP, a-x is the fastest")  # page and Markdown
    assert "With DP, a-x is the fastest" in markdown.page(built) and "a-x is the fastest" in page.page(built, {})
    assert ": a-x, " in list(conclusion.sentences(built))[1]  # the terminal
    assert words.text(tables).startswith("**With DP the fastest is a-x")  # README and findings
    rows = [line for line in latex.main(tables, section, "main").splitlines() if r"\textbf" in line]
    assert len(rows) == 1 and rows[0].startswith("a-x")
    frame = fastest_peer.frame(tables).set_index(["contestant", "against"])
    assert frame.other["b-x", fastest_peer.PEER] == "a-x" and frame.other["a-x", fastest_peer.PEER] == "b-x"
