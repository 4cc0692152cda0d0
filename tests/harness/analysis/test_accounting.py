"""The two judges against values on which independent accountants agree."""

from __future__ import annotations

import math

import pytest

from harness.analysis.accounting import epsilon_as_of_2017, epsilons
from harness.errors import BadInput


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "renyi", "tight"),
    [
        (256 / 60000, 1.1, 234, 0.740234, 0.306475),
        (256 / 60000, 1.1, 3515, 1.281144, 1.133706),
        (1.0, 10.0, 100, 4.728507, 4.37717809568122),
    ],
)
def test_known_values(rate, sigma, steps, renyi, tight):
    rdp, pld = epsilons(rate, sigma, steps, 1e-5)
    assert rdp == pytest.approx(renyi, abs=1e-5)
    assert 0 <= pld - tight <= 1e-3


def test_the_conversion_of_2017_is_that_of_libraries_of_its_time():
    # PyVacy searches all real orders, the judge a list of them: 0.7760 by PyVacy's own accountant (commit 2e0a9f4).
    run = (64 / 60000, 1.1, 938, 1e-5)
    assert 0.7760 <= epsilon_as_of_2017(*run) <= 1.01 * 0.7760
    assert epsilon_as_of_2017(*run) > epsilons(*run)[0]


def test_without_noise_there_is_no_privacy_and_without_steps_no_loss():
    assert epsilons(0.01, 0.0, 10, 1e-5) == (math.inf, math.inf)
    assert epsilons(0.01, 1.0, 0, 1e-5) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rate", "sigma", "delta", "word"),
    [
        (0.0, 1.0, 1e-5, "sample rate"),
        (1.5, 1.0, 1e-5, "sample rate"),
        (0.1, -1.0, 1e-5, "noise"),
        (0.1, 1.0, 0, "Delta"),
    ],
)
def test_bad_input_is_named(rate, sigma, delta, word):
    with pytest.raises(BadInput, match=word):
        epsilons(rate, sigma, 10, delta)
