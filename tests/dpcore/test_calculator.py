"""``python -m dpcore epsilon`` and ``sigma`` say what the accountants do, and refuse in one sentence."""

from __future__ import annotations

import re

import pytest

from dpcore.__main__ import main
from dpcore.accountants import create_accountant
from tests.dpcore.test_accountants import KNOWN

RUN = ["--n", "60000", "--batch", "256"]


def _printed(capsys, *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


@pytest.mark.parametrize(("accountant", "column"), [("prv", 4), ("rdp", 5)])
@pytest.mark.parametrize("row", [row for row in KNOWN if row[0] == 256 / 60_000])
def test_epsilon_is_the_known_one_rounded_up(capsys, row, accountant, column):
    _, sigma, steps, delta, *_ = row
    options = ("--sigma", str(sigma), "--steps", str(steps), "--delta", str(delta), "--accountant", accountant)
    epsilon = float(re.search(r"epsilon ([\d.]+)", _printed(capsys, "epsilon", *RUN, *options))[1])
    assert row[column] - 1e-6 <= epsilon <= row[column] + 1.1e-3


def test_epochs_are_rounds_of_the_loader_and_delta_the_customary_one(capsys):
    printed = _printed(capsys, "epsilon", *RUN, "--sigma", "1.1", "--epochs", "15")
    assert printed.startswith("epsilon 1.1355 at delta 1e-05\n") and "3525 steps" in printed


def test_sigma_keeps_the_budget_and_little_less_would_not(capsys):
    printed = _printed(capsys, "sigma", *RUN, "--epsilon", "3", "--epochs", "2", "--accountant", "rdp")
    sigma = float(re.search(r"sigma ([\d.]+)", printed)[1])
    for factor, fits in ((1.0, True), (1 - 1e-5, False)):
        accountant = create_accountant("rdp")
        accountant.step(noise_multiplier=factor * sigma, sample_rate=256 / 60_000, steps=470)
        assert (accountant.get_epsilon(1e-5) <= 3.0) == fits


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["epsilon", "--sigma", "-1", "--epochs", "1"], "--sigma is -1.0; it must be at least 0."),
        (["epsilon", "--sigma", "1", "--epochs", "0"], "epochs is 0.0; it must be above 0"),
        (["epsilon", "--sigma", "1", "--epochs", "1", "--delta", "2"], "--delta is 2.0; it must lie in (0, 1)"),
        (["epsilon", "--sigma", "1", "--epochs", "1", "--accountant", "x"], "There is no accountant 'x'"),
        (["epsilon", "--sigma", "1", "--epochs", "1", "--accountant", "pdl"], "Did you mean 'pld'?"),
        (["epsilon", "--sigma", "1", "--epochs", "1", "--batch", "70000"], "--batch is 70000.0; it must lie in (0, n]"),
        (["epsilon", "--sigma", "1"], "one of the arguments --epochs --steps is required"),
        (["sigma", "--epsilon", "0", "--epochs", "1"], "--epsilon is 0.0; it must be above 0."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as ended:
        main([arguments[0], *RUN, *arguments[1:]])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_a_promise_of_nothing_is_said_without_complaints(capsys):
    """It overflowed, with four warnings of numpy's, and a budget of 1e6 was searched for a minute."""
    assert re.match(r"epsilon \d{10}", _printed(capsys, "epsilon", *RUN, "--sigma", "0.001", "--epochs", "15"))
