"""Hold epsilon against two other packages on 40 settings: ``python -m proofs.judges`` (minutes; writes nothing).

dp_accounting's is an upper bound on a grid of 1e-4; of Opacus' PRV accountant the estimate is taken, whose error it
promises to be below 1e-3. Exits with 1 where ours is below both, or further than 1e-3 of its value above the lower one.
"""

from __future__ import annotations

import itertools
import sys

from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants import PRVAccountant as Peer

from dpcore.accountants import PRVAccountant

ALLOWED = 1e-3
SETTINGS = list(
    itertools.product(
        (0.7, 1.0, 1.5, 2.5), ((1e-3, 2000), (4e-3, 1000), (0.02, 500), (0.1, 100), (0.5, 20)), (1e-5, 1e-6)
    )
)
"""Noise multiplier, (sample rate, steps), delta."""


def judged(sigma: float, rate: float, steps: int, delta: float) -> tuple[float, float]:
    """Return the epsilon of dp_accounting and of Opacus."""
    step = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, use_connect_dots=True, value_discretization_interval=1e-4
    )
    peer = Peer()
    peer.history = [(sigma, rate, steps)]
    return step.self_compose(steps).get_epsilon_for_delta(delta), peer._get_dprv(
        eps_error=1e-3, delta_error=delta / 1000
    ).compute_epsilon(delta, delta / 1000, 1e-3)[1]


def main() -> int:
    """Print a row for every setting, and the largest distances."""
    worst, below = 0.0, 0
    print("| sigma | rate | steps | delta | dpcore | dp_accounting | Opacus, estimate |\n|---|---|---|---|---|---|---|")
    for sigma, (rate, steps), delta in SETTINGS:
        accountant = PRVAccountant()
        accountant.step(noise_multiplier=sigma, sample_rate=rate, steps=steps)
        own, (one, other) = accountant.get_epsilon(delta), judged(sigma, rate, steps, delta)
        print(f"| {sigma} | {rate} | {steps} | {delta:g} | {own:.5f} | {one:.5f} | {other:.5f} |", flush=True)
        worst = max(worst, own / min(one, other) - 1)
        below += own < min(one, other)
    print(f"{len(SETTINGS)} settings: at most {worst:.1e} above the lower judge, below both in {below}")
    return int(worst > ALLOWED or below > 0)


if __name__ == "__main__":
    sys.exit(main())
