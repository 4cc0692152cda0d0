"""Write what riskcal says of attacks on 30 runs: ``python -m proofs.risk_judge FILE`` (minutes; needs riskcal 1.5.1).

FILE is tests/dpcore/data/riskcal.json, which the tests hold dpcore's curve against: riskcal wants an environment of its
own (``pip install riskcal==1.5.1``). It takes dp_accounting's upper bounds on the losses of removal and of addition for
those of one pair, and its rates can be below those of the best test on the former alone: at sigma 0.7, rate 1e-3, 2,000
steps and 0.1 % false alarms it says 0.00161, where both that test and dpcore say 0.00169.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from riskcal import analysis

RATES = (1e-3, 1e-2, 0.1, 0.5)
SETTINGS = itertools.product(
    (0.7, 0.9, 1.2, 2.0, 4.0), ((1e-3, 2000), (4e-3, 1000), (0.01, 1000), (0.05, 200), (0.2, 50), (0.5, 10))
)
"""Noise multiplier, (sample rate, steps)."""


def judged(sigma: float, rate: float, steps: int) -> list[float]:
    """Return the advantage, and the true positive rate at each of the false ones."""
    one = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, use_connect_dots=True, value_discretization_interval=min(1e-4, rate / (10 * sigma))
    )
    removal: Any = one.self_compose(steps)
    addition: Any = privacy_loss_distribution.PrivacyLossDistribution(removal._pmf_add, removal._pmf_remove)
    found = [1 - np.minimum(*(analysis.get_beta_from_pld(of, alpha=a) for of in (removal, addition))) for a in RATES]
    return [analysis.get_advantage_from_pld(removal), *found]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    rows = []
    for sigma, (rate, steps) in SETTINGS:
        rows.append({"run": [sigma, rate, steps], "found": [float(v) for v in judged(sigma, rate, steps)]})
        print(rows[-1], flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("riskcal", "dp_accounting")}
    head = json.dumps({"versions": versions, "rates": RATES, "found": ["advantage", "tpr at each rate"]})
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.write_text(f'{head[:-1]}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
