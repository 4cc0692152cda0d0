"""A contestant against the fastest other framework and against PyTorch without DP, eager or compiled."""

from __future__ import annotations

import math

from harness.analysis.frames import build
from harness.report import contents, model
from harness.report.chapters import fastest_peer
from harness.report.formats import markdown, page
from tests.support import record_factory as factory

SECONDS = {
    ("pytorch", "eager", False): 1.0,
    ("pytorch", "compiled", False): 0.5,
    ("dpcore", "engine", True): 1.2,
    ("dpcore", "native", True): 0.9,
    ("jax", "vmap", True): 2.0,
    ("jax", "non-private", False): 0.1,
    ("opacus", "hooks", True): 3.0,
}


def records(rounds=5, seconds=None):
    # Drift by factors of ten from round to round: only pairing gets an interval of no width.
    return [
        factory.record(framework=f, variant=v, private=private, seconds=[value * 10.0**r], round=r)
        for r in range(rounds)
        for (f, v, private), value in {**SECONDS, **(seconds or {})}.items()
    ]


def standings(all_records):
    frame = fastest_peer.frame(build(all_records, factory.PAPER_ROWS))
    return {(row.contestant, row.against): row for row in frame.itertuples()}


def test_the_peer_is_the_fastest_private_contestant_of_another_framework():
    found = standings(records())
    # Neither the other variant of dpcore nor JAX without DP is a peer of dpcore's engine.
    row = found["dpcore-engine", fastest_peer.PEER]
    assert row.other == "jax-vmap" and row.n == 5 and math.isclose(row.ratio, 0.6)
    assert math.isclose(row.low, 0.6) and math.isclose(row.high, 0.6)
    assert found["jax-vmap", fastest_peer.PEER].other == "dpcore-native"


def test_without_dp_the_faster_of_eager_and_compiled_counts():
    row = standings(records())["dpcore-engine", fastest_peer.WITHOUT_DP]
    assert row.other == "pytorch-compiled" and math.isclose(row.ratio, 2.4)
    row = standings(records(seconds={("pytorch", "compiled", False): 1.5}))["dpcore-engine", fastest_peer.WITHOUT_DP]
    assert row.other == "pytorch-eager" and math.isclose(row.ratio, 1.2)


def test_who_shares_no_round_or_was_rejected_is_no_peer():
    lonely = factory.record(framework="jax", variant="vmap", seconds=[0.001], round=99)
    rejected = [
        factory.record(framework="backpack", variant="batch-grad", seconds=[0.001], round=r, gate_passed=False)
        for r in range(5)
    ]
    kept = [r for r in records() if r.cell.framework != "jax"]
    row = standings([*kept, lonely, *rejected])["dpcore-engine", fastest_peer.PEER]
    assert row.other == "opacus-hooks" and math.isclose(row.ratio, 0.4)


def test_a_cell_names_its_opponent_and_every_doubt():
    built = build(records(), factory.PAPER_ROWS)
    section = model.sections(built)[0]
    peer, plain = fastest_peer.grids(fastest_peer.frame(built), section)
    shown = dict(peer.rows)
    assert shown["dpcore-native"] == "0.45× [0.45, 0.45] jax-vmap"
    assert dict(plain.rows)["dpcore-native"] == "1.80× [1.80, 1.80] pytorch-compiled"
    assert "Mean of 5 paired rounds" in peer.notes[0]


def test_tasks_stand_in_their_usual_order_and_a_note_once_in_a_chapter():
    rows = [
        factory.record(task=task, framework=name, private=name != "pytorch", seconds=[1.0], round=r)
        for task in ("imdb-lstm", "cifar10-cnn", "mnist-cnn")
        for name in ("a", "b", "pytorch")
        for r in range(3)
    ]
    built = contents.build(rows)
    chapter = next(c for c in built.chapters if c.title == "Against the fastest peer")
    peers = [grid.title for grid in chapter.grids if "peer" in grid.title]
    assert [title.split(":")[0] for title in peers] == ["MNIST CNN", "CIFAR-10 CNN", "IMDb LSTM"]
    for text in (page.page(built, {}), markdown.page(built)):
        assert text.count("Peer: a private contestant of another framework") == 1


def test_alone_there_is_no_chapter():
    built = build([factory.record()], factory.PAPER_ROWS)
    assert fastest_peer.frame(built).empty
    titles = [c.title for c in contents.end_to_end(built) if c.grids]
    assert "Seconds per epoch" in titles and "Against the fastest peer" not in titles
