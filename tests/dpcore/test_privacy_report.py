"""The page about a run's privacy, the plan of one, and the loop's bar."""

from __future__ import annotations

import re
import sys

import pytest
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dpcore
from dpcore import PrivacyEngine, UnsupportedError
from dpcore.__main__ import main
from dpcore.accountants import create_accountant
from dpcore.privacy_report import report_of_checkpoint
from tests.dpcore.private_setup import make, small_data, step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An engine after six steps, and its checkpoint."""
    engine, model, optimizer, loader = make(nn.Linear(6, 3).double(), PrivacyEngine(), noise_multiplier=1.3)
    for batch in loader:
        step(model, optimizer, *batch)
    path = tmp_path_factory.mktemp("run") / "saved.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    yield engine, path
    assert optimizer.steps == 6  # and it was there while the engine was read


def test_the_page_says_what_the_accountant_says(run):
    engine, _ = run
    page = str(dpcore.report(engine))
    epsilon = float(re.search(r"\(ε = ([\d.]+), δ = 0\.01\)", page)[1])
    assert engine.get_epsilon(0.01) <= epsilon <= 1.01 * engine.get_epsilon(0.01)
    assert len(re.findall(r"^\| [\de.-]+ \| [\d.]+ \|$", page, re.MULTILINE)) == 3
    found = float(re.search(r"at 1 % false alarms \| ([\d.]+)\s%", page)[1])
    assert 100 * engine.accountant.tpr_at(0.01) <= found <= 101 * engine.accountant.tpr_at(0.01)
    for said in ("one example", "60", "Poisson samples", "6 with noise multiplier 1.3, sample rate 0.166667", "flat"):
        assert f"| {said}" in page or f" {said} |" in page
    assert "## Not covered" in page and "Not as it must be" not in page


def test_a_checkpoint_has_the_same_page(run, tmp_path, capsys):
    engine, path = run
    main(["report", str(path)])
    assert capsys.readouterr().out == f"{dpcore.report(engine)}\n"
    main(["report", str(path), "--out", str(tmp_path / "page.md")])
    assert (tmp_path / "page.svg").read_text().startswith("<svg") and "(page.svg)" in (tmp_path / "page.md").read_text()
    main(["report", str(path), "--out", str(tmp_path / "page.html")])
    html = (tmp_path / "page.html").read_text()
    assert html == dpcore.report(engine).html() and html.count("<polyline") == 2 and "&lt;" not in html
    # The figure stands with the attacks that it shows, and rules of style touch nothing of a notebook around the page.
    assert html.index("What the best attack") < html.index("<svg") < html.index("How it was trained")
    style = re.search(r"<style>(.*)</style>", html)[1]
    assert all(rule.startswith(".dpcore-report") for rule in style.split("}") if rule)


def test_what_is_not_as_it_must_be_is_on_the_page():
    engine, model, optimizer, loader = make(nn.Linear(6, 3).double(), PrivacyEngine(seed=3), noise_multiplier=1.0)
    step(model, optimizer, *next(iter(loader)))
    assert "Not as it must be: the noise is of a seed that was chosen" in str(dpcore.report(engine))
    shuffled = DataLoader(small_data(), batch_size=10, shuffle=True)
    given = {"noise_multiplier": 1.0, "poisson_sampling": False, "data_loader": shuffled}
    engine, model, optimizer, loader = make(nn.Linear(6, 3).double(), PrivacyEngine(), **given)
    step(model, optimizer, *next(iter(loader)))
    page = str(dpcore.report(engine))
    assert "batches were not drawn by dpcore" in page and "| batches | not drawn by dpcore |" in page
    by_hand = PrivacyEngine()
    by_hand.accountant.step(noise_multiplier=1.0, sample_rate=0.1, steps=10)
    assert "batches may not have been drawn by dpcore" in str(dpcore.report(by_hand))
    by_hand.accountant.step(noise_multiplier=0.0, sample_rate=0.1)
    assert "This model is not private: a step had no noise." in str(dpcore.report(by_hand))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "{path}", "--out", "page.pdf"], r"^The report's path is 'page.pdf'; it must end with \.html or"),
        (["report", "nowhere.pt"], "No such file.*nowhere.pt"),
        (
            ["plan", "--n", "100", "--epsilon", "3", "--batches", "200"],
            r"^--batches is 200\.0; each must lie in \(",
        ),
        (["plan", "--n", "100", "--epsilon", "3", "--plot", "x.png"], r"^--plot is 'x.png'; it must end with \.svg"),
        (["plan", "--n", "100", "--epsilon", "-1"], r"^target_epsilon is -1\.0; it must be above 0"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([argument.format(path=run[1]) for argument in arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and re.search(said, error) and error.count("\n") == 1


def test_no_step_is_nothing_to_report():
    with pytest.raises(ValueError, match="No private step was counted"):
        dpcore.report(PrivacyEngine())


def test_the_plan_keeps_the_budget(tmp_path, capsys):
    plot = tmp_path / "plan.svg"
    main(["plan", "--n", "6000", "--epsilon", "2", "--batches", "100", "600", "--epochs", "1", "--plot", str(plot)])
    rows = re.findall(r"^ +(\d+) +1 +(\d+) +([\d.]+) +([\d.e-]+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 2 and plot.read_text().count("<polyline") == 1
    for batch, steps, sigma, noise in rows:
        accountant = create_accountant("prv")
        accountant.step(noise_multiplier=float(sigma), sample_rate=int(batch) / 6000, steps=int(steps))
        assert 1.9 < accountant.get_epsilon(1e-4) <= 2.0
        assert float(noise) == pytest.approx(float(sigma) / int(batch), rel=1e-2)


def test_the_bar_ends_with_epsilon(capsys):
    engine, model, optimizer, loader = make(nn.Linear(6, 3).double(), PrivacyEngine(), noise_multiplier=1.3)
    for x, y in engine.progress(loader):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 6
    assert re.search(r"6/6 .*epsilon 0\.726 at delta 0\.01", capsys.readouterr().err)


def test_without_tqdm_there_is_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(UnsupportedError, match="pip install tqdm"):
        next(PrivacyEngine().progress([1]))


def test_runs_whose_optimizers_are_gone_are_on_the_page():
    engine, users = PrivacyEngine(), dpcore.users(small_data(), [row % 20 for row in range(60)], K=2)
    shuffled = DataLoader(small_data(), batch_size=10, shuffle=True)
    for given in ({"poisson_sampling": False, "data_loader": shuffled}, {"data_loader": DataLoader(users)}):
        _, model, optimizer, loader = make(nn.Linear(6, 3).double(), engine, noise_multiplier=1.0, **given)
        step(model, optimizer, *next(iter(loader)))
    del model, optimizer, loader
    page = str(dpcore.report(engine))
    assert "batches were not drawn by dpcore" in page
    assert "removing one training example" in page and "| unit | one example |" in page


def test_what_cannot_be_known_is_on_the_page():
    own = make(nn.Linear(6, 3).double(), PrivacyEngine(), noise_multiplier=1.0, check_batches=False)
    beside = make(nn.Linear(6, 3).double(), PrivacyEngine(), noise_multiplier=1.0)
    beside[0].accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    for engine, model, optimizer, loader in (own, beside):
        step(model, optimizer, *next(iter(loader)))
        assert "batches may not have been drawn by dpcore" in str(dpcore.report(engine))


def test_a_checkpoint_tells_that_its_seed_was_chosen(tmp_path):
    for seed in (3, None):
        engine, model, optimizer, loader = make(nn.Linear(6, 3), PrivacyEngine(seed=seed), noise_multiplier=1.0)
        step(model, optimizer, *(part.float() if part.is_floating_point() else part for part in next(iter(loader))))
        engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
        assert ("of a seed that was chosen" in str(report_of_checkpoint(tmp_path / "run.pt"))) is (seed is not None)


def test_what_the_page_says_where_epsilon_is_infinite_or_another_accountants():
    cut = PrivacyEngine(accountant="rdp")
    cut.accountant.step(noise_multiplier=1.0, sample_rate=0.1, steps=10)
    assert "| accountant of the run, whose ε is another one | rdp |" in str(dpcore.report(cut))
    cut.accountant.add_failure_probability(0.5)
    assert "No ε is promised at δ = 1e-05: steps may have failed" in str(dpcore.report(cut))
    with pytest.raises(TypeError, match="was given a Linear; it takes the PrivacyEngine"):
        dpcore.report(nn.Linear(1, 1))


@pytest.mark.filterwarnings("ignore")
def test_the_page_tells_of_cut_batches_and_of_models_that_nobody_examined():
    given = {"noise_multiplier": 1.0, "max_batch_size": 30, "check_isolation": False}
    engine, model, optimizer, loader = make(nn.Linear(6, 3).double(), PrivacyEngine(), **given)
    step(model, optimizer, *next(iter(loader)))
    page = str(dpcore.report(engine))
    assert "Not as it must be: check_isolation=False" in page and "| batches are cut to | 30 |" in page
