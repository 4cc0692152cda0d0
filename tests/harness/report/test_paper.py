"""The paper against records: the paper's own table must confirm the paper's own figures."""

from __future__ import annotations

import pytest

from harness.analysis.frames import build, published
from harness.report import model
from harness.report.chapters import paper, paper_claims
from harness.report.chapters import tables as task_tables
from tests.support import record_factory as factory

ROWS = {
    "jax-vmap": "JAX (DP)",
    "pytorch-eager": "PyTorch without DP",
    "opacus-hooks": "Opacus",
    "backpack-a": "BackPACK",
    "tfp-xla": "Custom TFP (XLA)",
    "pyvacy-loop": "PyVacy",
}


def as_records(change=lambda row: 1.0, **more):
    """The published table as if it had been measured here in three rounds; ``change`` multiplies a row's seconds."""
    names = {row: name for name, row in ROWS.items()}
    records = []
    for line in published().itertuples():
        framework, variant = names[line.paper_row].split("-")
        for r in range(3):
            records.append(
                factory.record(
                    task=line.task,
                    framework=framework,
                    variant=variant,
                    private=line.paper_row != "PyTorch without DP",
                    batch_size=line.batch_size,
                    seconds=[line.seconds * change(line.paper_row) * 1.1**r],
                    round=r,
                    **more,
                )
            )
    return records


def outcomes(tables):
    return dict(zip(paper_claims.claims(tables).claim, paper_claims.claims(tables).outcome, strict=True))


@pytest.fixture(scope="module")
def same():
    return build(as_records(), ROWS)


def test_ratios_then_and_now_agree_on_the_paper_s_own_table(same):
    frame = paper.then_and_now(same)
    assert len(frame) == len(published()) - 32
    assert frame.ratio.to_numpy() == pytest.approx(frame.paper_ratio.to_numpy())


def test_the_order_agrees_with_itself_and_turns_round_with_the_seconds(same):
    frame = paper.rank_correlation(same)
    assert len(frame) == 32 and frame.spearman.min() == pytest.approx(1.0)
    few = build([r for r in as_records() if r.cell.framework in {"jax", "opacus"}], ROWS)
    assert paper.rank_correlation(few).empty


def rows_of(tables):
    return paper_claims.claims(tables).set_index("claim")


MEAN = "seconds at batch 16 / at 2048, mean of 4 tasks"
FASTEST_ON_LSTM = "Custom TFP (XLA) is the fastest on LSTM: next / Custom TFP (XLA)"


def test_the_paper_s_table_bears_out_its_own_figures_where_it_does(same):
    frame = rows_of(same)
    # Where both sides are the same table nothing can differ from it.
    assert (frame.measured == frame.paper).all()
    known = frame.here_over_paper.dropna()
    assert len(known) > 20 and known.to_numpy() == pytest.approx(1.0)
    assert (frame.outcome == frame.own_table).all()
    # These means do not follow from its table: the text has 40, 37.8 and 12.8.
    for row, quoted, computed in (
        ("Opacus", "40×", "39.4"),
        ("PyTorch without DP", "37.8×", "36.7"),
        ("JAX (DP)", "12.8×", "13.3"),
    ):
        assert tuple(frame.loc[f"{row}: {MEAN}", ["quoted", "paper", "outcome"]]) == (quoted, computed, "holds")
    # "Consistently the lowest", but 8.68 s for JAX and 8.80 s for TFP at batch size 64.
    assert tuple(frame.loc[FASTEST_ON_LSTM, ["outcome", "own_table"]]) == ("does not hold", "does not hold")
    # "Consistently the highest", but 201 s against 359 s for Opacus on the LSTM at batch size 16.
    assert frame.loc["PyVacy is the slowest: PyVacy / next", "own_table"] == "does not hold"
    untestable = frame[frame.outcome == paper_claims.UNTESTABLE].index
    assert len(untestable) == 6 and all("first epoch" in c or "Beyond 2048" in c for c in untestable)
    others = frame.drop([FASTEST_ON_LSTM, "PyVacy is the slowest: PyVacy / next", *untestable])
    assert set(others.outcome) == {"holds"}, others[others.outcome != "holds"]


def test_a_figure_that_changed_does_not_hold_and_says_by_how_much():
    frame = rows_of(build(as_records(lambda row: 3.0 if row == "Opacus" else 1.0), ROWS))
    for claim in ("Opacus / PyTorch without DP: MNIST, CIFAR-10, embedding", "Opacus / JAX (DP) at 2048: MNIST"):
        assert frame.loc[claim, "outcome"] == "does not hold"
        assert frame.loc[claim, "here_over_paper"] == pytest.approx(3.0)
    assert frame.loc[f"Opacus: {MEAN}", "outcome"] == "holds"
    assert (
        frame.loc["Opacus surpasses JAX (DP) on CIFAR-10 at 256 to 2048: JAX (DP) / Opacus", "outcome"]
        == "does not hold"
    )


def test_a_changed_order_does_not_hold():
    """PyVacy first of four is wrong in three of six pairs (at 16, where it is third in the table, in two)."""
    frame = rows_of(build(as_records(lambda row: 0.001 if row == "PyVacy" else 1.0), ROWS))
    order = frame.loc["LSTM: share of pairs of DP rows in the order of the table"]
    assert order.outcome == "does not hold" and order.measured == "0.50–0.67"
    assert frame.loc["PyVacy is the slowest: PyVacy / next", "outcome"] == "does not hold"
    assert frame.loc["JAX (DP) is the fastest on MNIST and embedding: next / JAX (DP)", "outcome"] == "does not hold"


@pytest.mark.parametrize(
    ("at_8192", "closes", "outperforms"),
    [(0.9, "holds", "holds"), (1.2, "holds", "does not hold"), (1.5, "does not hold", "does not hold")],
)
def test_the_conjecture_is_held_against_batches_beyond_2048(at_8192, closes, outperforms):
    """On MNIST Opacus takes 1.4 times as long as JAX at 2048; here ``at_8192`` times at 8192."""
    beyond = [
        factory.record(framework=framework, variant=variant, batch_size=8192, seconds=[seconds * 1.1**r], round=r)
        for framework, variant, seconds in (("jax", "vmap", 0.1), ("opacus", "hooks", 0.1 * at_8192))
        for r in range(3)
    ]
    frame = rows_of(build([*as_records(), *beyond], ROWS))
    closing = frame.loc["Beyond 2048 the gap Opacus / JAX (DP) closes: the gap there / at 2048"]
    assert (closing.outcome, closing.cells) == (closes, 1) and closing.own_table == paper_claims.UNTESTABLE
    assert frame.loc["Beyond 2048 Opacus outperforms JAX (DP): Opacus / JAX (DP)", "outcome"] == outperforms
    assert (
        frame.loc["Beyond 2048 Opacus outperforms Custom TFP (XLA): Opacus / Custom TFP (XLA)", "outcome"]
        == paper_claims.UNTESTABLE
    )


def test_compile_time_counts_as_part_of_the_first_epoch():
    t = build(as_records(compile_seconds=4.0), ROWS)
    row = rows_of(t).loc["JAX (DP): first epoch / median epoch, largest"]
    # The shortest epoch takes 0.04 s, 10 % more in each further round: the median of 1 + 100, 1 + 91 and 1 + 83.
    assert (row.measured, row.outcome) == ("91.9", "holds")


def test_without_a_warm_up_the_first_of_the_epochs_holds_the_compilation():
    epochs = [
        factory.record(framework="jax", variant="vmap", protocol="paper-v1", seconds=[60.0, 2.0, 2.0, 2.0], round=r)
        for r in range(3)
    ]
    row = rows_of(build(epochs, ROWS)).loc["JAX (DP): first epoch / median epoch, largest"]
    assert (row.measured, row.outcome) == ("30.0", "does not hold")


@pytest.mark.parametrize(("rounds", "disturbed"), [(1, False), (2, True)])
def test_few_processes_and_disturbed_ones_are_shown_and_not_judged(rounds, disturbed):
    records = [r for r in as_records(disturbed=disturbed) if r.block.round < rounds]
    frame = rows_of(build(records, ROWS))
    assert set(frame.outcome) == {paper_claims.UNTESTABLE} and (frame.measured != "").sum() > 20
    row = frame.loc["Opacus / PyTorch without DP: LSTM"]
    assert (row.measured, row.n, row.disturbed) == (row.paper, rounds, disturbed)


def test_a_wide_interval_decides_nothing():
    """JAX takes 0.5 to 1.4 of the time of Opacus in three rounds: the interval of the ratio holds 1 and the bounds."""
    records = [
        factory.record(framework=framework, variant=variant, batch_size=64, seconds=[seconds], round=r)
        for framework, variant, both in (("jax", "vmap", (0.5, 0.7**0.5, 1.4)), ("opacus", "hooks", (1.0, 1.0, 1.0)))
        for r, seconds in enumerate(both)
    ]
    frame = rows_of(build(records, ROWS))
    fastest = "JAX (DP) is the fastest on MNIST and embedding: next / JAX (DP)"
    assert (frame.loc[fastest, "outcome"], frame.loc[fastest, "measured"]) == ("undecided", "1.20")


def test_a_claim_says_at_how_many_of_the_paper_s_places_it_was_tested():
    claim = "Opacus / PyTorch without DP: MNIST, CIFAR-10, embedding"
    few = build([r for r in as_records(extrapolated=True) if r.cell.batch_size == 64], ROWS)
    row = rows_of(few).loc[claim]
    assert (row.cells, row.paper_cells, row.n, row.extrapolated) == (3, 24, 3, True)
    grid = task_tables.against_the_paper(few, model.sections(few)[0])[-1]
    assert grid.rows[0][3].endswith("ᵉ") and grid.rows[0][4:6] == ("3 of 24", "3")
    assert grid.notes[0].startswith("Claims: of section 3.1.3")
    assert "pyvacy-loop for PyVacy" in " ".join(grid.notes)


def test_synthetic_data_support_no_claim():
    found = outcomes(build(as_records(synthetic=True), ROWS))
    assert set(found.values()) == {"cannot be tested here"}


def test_the_chapter_says_what_it_rests_on():
    t = build(factory.quick_run(), factory.PAPER_ROWS)
    grids = task_tables.against_the_paper(t, model.sections(t)[0])
    assert grids[0].rows[0][:4] == ("jax-vmap", "JAX (DP)", "64", "0.61×")
    claim, quoted, table, measured, _, _, ratio, outcome = grids[-1].rows[0]
    assert (claim, quoted, table) == (
        "Opacus / PyTorch without DP: MNIST, CIFAR-10, embedding",
        "2× to 2.9×",
        "1.91–3.00",
    )
    assert measured and ratio.endswith("×") and outcome == "does not hold"
    assert "widened by a factor of 1.25" in grids[-1].notes[1]
