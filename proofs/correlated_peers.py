"""Hold correlated noise against JAX Privacy and Opake: ``python -m proofs.correlated_peers --peers PYTHON``.

PYTHON is the interpreter of an environment with ``pip install jax-privacy==2.0.0 dp-accounting==0.6.0
opake-dpftrl==0.16.1`` (3.11.7 and 3.12.1 cannot import Opake's accounting). It is asked once, by JSON; all of it takes
some minutes of one thread. A round has b batches and comes k times, always in the same order: n = b k steps.

The first table holds what each mechanism costs: the sensitivity of its matrix C by dpcore, and by how much it is over
JAX Privacy's for a fixed order of epochs, over JAX Privacy's for participations at least b steps apart, and over
Opake's; then epsilon at a noise multiplier of 10, by dpcore round after round, and by how much it is over that of one
Gaussian mechanism by dp_accounting, and over Opake's. The command ends with 1 where dpcore's is below JAX Privacy's or
dp_accounting's by more than 1e-9 of it, or further than 1e-3 from any of them.

The second table holds how good the weights are: the root mean variance of the sum of all noise so far, times the
sensitivity, both by JAX Privacy, for dpcore's matrices and for those that the others find for the same participation.
Weights that dpcore can take are handed to it.

The third table holds the same of banded matrices alone, for longer runs and with momentum: bands by dpcore's formula,
those that it finds, and those that JAX Privacy finds, which knows no momentum; with the processor's seconds. The
command ends with 1 where dpcore's have more noise by 1e-6 of it, or more than it says itself. All tables go between the
marks in the page of findings.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from dpcore import CorrelatedNoise
from dpcore.accountants import PRVAccountant
from dpcore.bands import log_noise, response_of
from proofs.correlated_utility import PAGE, summed
from proofs.views_accuracy import write_table

BEGIN = "<!-- table of proofs/correlated_peers.py -->"
PACKAGES = ("jax-privacy", "dp-accounting", "opake-dpftrl")
SIGMA, DELTA, EXACT, ALLOWED = 10.0, 1e-5, 1e-9, 1e-3
CYCLES = ((1, 8), (5, 3), (16, 8), (64, 4), (100, 10), (128, 1))
"""Batches of a round, and rounds: of the first table."""
MAKERS: tuple[tuple[str, float], ...] = (
    ("previous", 0.5), ("previous", 0.95), ("square_root", 4), ("square_root", 32), ("banded", 4), ("banded", 32),
)  # fmt: skip
RUNS = ((16, 8), (64, 4), (256, 1), (157, 4))
"""Those of the second one; the last is IMDb's in the page of findings."""
LONGER, MOMENTA = ((1000, 8), (1000, 16), (1000, 64), (10_000, 8), (10_000, 16), (10_000, 64)), (0.0, 0.9)
"""Steps and bands of the third one."""
BANDS, CUTS, MOST_DENSE = (4, 8, 16, 32, 64), (8, 32), 256


def column(mechanism: CorrelatedNoise, steps: int) -> list[float]:
    """Return the first column of C."""
    return mechanism.responses(steps, steps)  # of an example that takes part once, at first


# The next five run in the other Python alone, by their text.


def square(first: Any, n: int, equal: bool = False) -> Any:
    """Return C by its first column, its columns divided by their norms if they are to be equal."""
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import toeplitz

    made = toeplitz.materialize_lower_triangular(jnp.asarray(first), n)
    return made / jnp.linalg.norm(made, axis=0) if equal else made


def error(c: Any, rounds: int) -> float:
    """Return the root mean variance of the sum of all noise so far, times the sensitivity."""
    from jax_privacy.matrix_factorization import dense, sensitivity

    variance = float(dense.per_query_error(strategy_matrix=c).mean())
    return variance**0.5 * sensitivity.fixed_epoch_sensitivity(c, rounds)


def cost(of: dict[str, Any]) -> dict[str, float]:
    """Return what the others say of a mechanism of the first table."""
    import dp_accounting
    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import sensitivity, toeplitz
    from opake.dpftrl import noise
    from opake.dpftrl.accounting import mf_gaussian

    b, k, value, first = of["b"], of["k"], of["value"], jnp.asarray(of["column"])
    theirs = {
        "previous": lambda: noise.lambda_cgd_strategy(lambda_=value, normalized=False),
        "square_root": lambda: noise.bisr_strategy(bandwidth=value, normalized=False),
        "banded": lambda: noise.bsr_strategy(bandwidth=value, alpha=1.0, beta=0.0),
    }[of["maker"]]()
    given = {"n_steps": b * k, "min_sep": b, "max_participations": k}
    fixed = sensitivity.fixed_epoch_sensitivity(square(first, b * k), k)
    return {
        "fixed": fixed,
        "apart": float(toeplitz.minsep_sensitivity_squared(first, min_sep=b, n=b * k, max_participations=k)) ** 0.5,
        "opake": theirs.sensitivity(**given),
        "gaussian": dp_accounting.get_epsilon_gaussian(of["sigma"] / fixed, of["delta"], tol=1e-13),
        "grid": mf_gaussian(of["sigma"], theirs, **given).epsilon_at(of["delta"]),
    }


def run(of: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the mechanisms of a run of the second table: dpcore's, and those that the others find."""
    import sys
    import time

    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import buffered_toeplitz, dense, toeplitz
    from opake.dpftrl import noise

    b, k, n, found = of["b"], of["k"], of["b"] * of["k"], []

    def note(name: str, c: Any, **more: Any) -> None:
        found.append({"name": name, "error": error(c, k), **more})
        print(f"{b} x {k}, {time.process_time():.0f} s: {name} {found[-1]['error']:.4f}", file=sys.stderr, flush=True)

    for name, first in of["own"].items():
        note(name, square(first, n))
    for label, bands in of["bands"].items():
        first = toeplitz.optimize_banded_toeplitz(n, bands)
        note(f"JAX Privacy: banded Toeplitz, {label}", square(first, n), bands=[float(w / first[0]) for w in first])
        note(f"JAX Privacy: banded Toeplitz, {label}, equal columns", square(first, n, equal=True))
        root = noise.bisr_strategy(bandwidth=bands).coefficients(n_steps=n).numpy()
        note(f"Opake: bisr, {label}, equal columns", square(root, n, equal=True))
        if bands <= of["most"]:
            band = noise.band_mf_strategy(bands=bands).coefficients(n_steps=n).numpy()
            note(f"Opake: band_mf, {label}", square(band, n), bands=[float(w / band[0]) for w in band])
    powers = [square(jnp.power(s / 50, jnp.arange(n)), n, equal=True) for s in range(30, 50)]
    note("Opake: lambda_cgd, best share, equal columns", min(powers, key=lambda c: error(c, k)))
    made = buffered_toeplitz.optimize(n=n, min_sep=b, max_participations=k, error="mean")
    back = [float(w) for w in made.inverse().toeplitz_coefs(n)]
    note("JAX Privacy: BLT, least mean", square(made.toeplitz_coefs(n), n), back=back, buffers=len(made.buf_decay))
    blt = noise.blt_strategy().coefficients(n_steps=n, min_sep=b, max_participations=k).numpy()
    note("Opake: blt, least maximum", square(blt, n))
    if of["dense"]:
        note("JAX Privacy: dense", dense.optimize(n, epochs=k))
    return found


def longer(of: dict[str, Any]) -> dict[str, Any]:
    """Return the noise of bands of the third table, and of those that JAX Privacy finds for as many."""
    import time

    import jax.numpy as jnp
    from jax_privacy.matrix_factorization import toeplitz

    n, start = of["n"], time.process_time()
    theirs = toeplitz.optimize_banded_toeplitz(n, of["bands"]).block_until_ready()
    seconds, found = time.process_time() - start, []
    for each in of["momenta"]:
        bands = {name: jnp.asarray(weights) for name, weights in each["own"].items()} | {"JAX Privacy": theirs}
        given = {"n": n, "workload_coef": jnp.asarray(each["response"])}
        variances = {name: toeplitz.per_query_error(strategy_coef=c, **given).mean() for name, c in bands.items()}
        found.append({name: float(variances[name] * (c @ c)) ** 0.5 for name, c in bands.items()})
    return {"noise": found, "seconds": seconds}


def ask(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the others say, by their Python."""
    text = "\n\n".join(inspect.getsource(of) for of in (square, error, cost, run, longer))
    text = f"""from __future__ import annotations
import importlib.metadata, json, sys
from typing import Any
{text}
asked = json.load(sys.stdin)
said = {{name: [globals()[name](of) for of in asked[name]] for name in asked}}
said["versions"] = [f"{{of}} {{importlib.metadata.version(of)}}" for of in {PACKAGES}]
json.dump(said, sys.stdout)
"""
    # One thread, and no numbers of single precision.
    one = {"JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    done = subprocess.run(
        [python, "-c", text], input=json.dumps(asked), env={**os.environ, "PYTHONPATH": "", **one},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{python} failed, for the reason above; it needs {' and '.join(PACKAGES)}.")
    return json.loads(done.stdout)


def epsilon(costs: list[float]) -> float:
    """Return dpcore's, of rounds of such costs, each counted by itself."""
    accountant = PRVAccountant()
    for each in costs:
        accountant.step(noise_multiplier=SIGMA / math.sqrt(each), sample_rate=1.0)
    return accountant.get_epsilon(DELTA)


def asked_costs() -> list[dict[str, Any]]:
    """Return the mechanisms of the first table."""
    found = []
    for (b, k), (maker, value) in itertools.product(CYCLES, MAKERS):
        if maker != "banded" or value <= b:
            mechanism = getattr(CorrelatedNoise, maker)(value)
            found.append(
                {"b": b, "k": k, "maker": maker, "value": value, "column": column(mechanism, b * k), "sigma": SIGMA,
                 "delta": DELTA}
            )  # fmt: skip
    return found


def costs_table(asked: list[dict[str, Any]], said: list[dict[str, float]]) -> tuple[list[str], bool]:
    """Return the first table's lines, and whether dpcore's figures are what they must be."""
    head = "mechanism | b × k | sensitivity | over epochs' | over apart's | over Opake's"
    lines = [f"| {head} | ε | over dp_accounting's | over Opake's |", f"|---|---|{'--:|' * 7}"]
    most, least = -math.inf, math.inf
    for of, by in zip(asked, said, strict=True):
        costs = getattr(CorrelatedNoise, of["maker"])(of["value"]).costs(of["b"], of["k"])
        moved, spent = math.sqrt(math.fsum(costs)), epsilon(costs)
        over = [moved / by[judge] - 1 for judge in ("fixed", "apart", "opake")]
        over += [spent / by[judge] - 1 for judge in ("gaussian", "grid")]
        most, least = max(most, *map(abs, over)), min(least, over[0], over[1], over[3])
        signed = [f"{o:+.0e}" for o in over]
        cells = f"{of['maker']}({of['value']})", f"{of['b']} × {of['k']}", f"{moved:.6f}", *signed[:3], f"{spent:.6f}"
        lines.append(f"| {' | '.join([*cells, *signed[3:]])} |")
    said_last = f"the lowest is {least:+.0e} over JAX Privacy's or dp_accounting's, the furthest {most:.0e} from any"
    return [*lines, "", f"{len(asked)} settings: {said_last}."], least >= -EXACT and most <= ALLOWED


def own(b: int, k: int) -> dict[str, CorrelatedNoise]:
    """Return dpcore's mechanisms for a run, by their names in the second table."""
    error = {share / 50: summed(CorrelatedNoise.previous(share / 50), b, k) for share in range(50)}
    found = {
        "dpcore: independent": CorrelatedNoise.previous(0.0),
        "dpcore: previous, best share": CorrelatedNoise.previous(min(error, key=error.__getitem__)),
    }
    for maker in (CorrelatedNoise.square_root, CorrelatedNoise.banded):
        fit = {p: maker(p) for p in sorted({*BANDS, b}) if p <= b or maker == CorrelatedNoise.square_root}
        name = f"dpcore: {maker.__name__}"
        found |= {f"{name}, {label}": fit[p] for label, p in labels(b).items() if p in fit}
        if maker == CorrelatedNoise.banded:
            found |= {f"{name} for the steps, {label}": maker(p, steps=b * k) for label, p in labels(b).items()}
        found[f"{name}, best number"] = min(fit.values(), key=lambda mechanism: summed(mechanism, b, k))
    return found


def labels(b: int) -> dict[str, int]:
    """Return the numbers of bands that are compared, by their names."""
    return {"8": 8} | ({"32": 32} if b >= 32 else {}) | {"b": b}


def asked_runs() -> list[dict[str, Any]]:
    """Return the runs of the second table."""
    return [
        {"b": b, "k": k, "bands": labels(b), "most": 32, "dense": b * k <= MOST_DENSE,
         "own": {name: column(mechanism, b * k) for name, mechanism in own(b, k).items()}}
        for b, k in RUNS
    ]  # fmt: skip


def handed(b: int, k: int, by: dict[str, Any]) -> CorrelatedNoise | None:
    """Return a mechanism of weights that the others found, or None where dpcore refuses them.

    Raises:
        AssertionError: it is not as good as JAX Privacy says.
    """
    try:
        mechanism = CorrelatedNoise(tuple(by.get("bands") or by["back"]), is_banded="bands" in by)
    except ValueError:
        return None
    if not math.isclose(summed(mechanism, b, k), by["error"], rel_tol=1e-6):
        raise AssertionError(f"{by['name']}: {summed(mechanism, b, k)} by dpcore, {by['error']} by JAX Privacy")
    return mechanism


def runs_table(asked: list[dict[str, Any]], said: list[list[dict[str, Any]]]) -> list[str]:
    """Return the second table's lines, and those about weights that were handed over."""
    cells: dict[str, list[str]] = {}
    refused, taken, buffers = [], 0, []
    for at, (of, found) in enumerate(zip(asked, said, strict=True)):
        b, k, found = of["b"], of["k"], list(found)
        least = min(by["error"] for by in found if by["name"] in of["own"])
        for by in [by for by in found if "bands" in by or "back" in by]:
            mechanism = handed(b, k, by)
            taken += mechanism is not None
            refused += [f"{by['name']} at {b} × {k}"] if mechanism is None else []
            if mechanism is not None and "back" in by:
                buffers.append(str(by["buffers"]))
                cuts = {cut: summed(CorrelatedNoise(mechanism.weights[:cut]), b, k) for cut in CUTS}
                found += [{"name": f"dpcore: weights of JAX Privacy's BLT, {c}", "error": e} for c, e in cuts.items()]
        for by in found:
            row = cells.setdefault(by["name"], [""] * len(asked))
            row[at] = f"{by['error']:.3f} ({by['error'] / least:.3f})"
    names = [f"{of['b']} × {of['k']}" for of in asked]
    lines = [f"| mechanism | {' | '.join(names)} |", f"|---|{'--:|' * len(asked)}"]
    for name in sorted(cells, key=lambda name: (not name.startswith("dpcore"), name)):
        lines.append(f"| {name} | {' | '.join(cells[name])} |")
    lines += [
        "",
        f"In brackets: over the least of dpcore's own. dpcore takes {taken} of {taken + len(refused)} weights that the "
        f"others found, with the same figure; refused: {', '.join(refused) or 'none'}. The BLT of least mean has "
        f"{', '.join(buffers)} buffers.",
    ]
    return lines


def asked_longer() -> list[dict[str, Any]]:
    """Return what the third table is about."""
    CorrelatedNoise.banded(2, steps=2)  # loads scipy's optimiser, whose time is none of theirs
    found = []
    for n, bands in LONGER:
        asked: dict[str, Any] = {"n": n, "bands": bands, "momenta": []}
        for momentum in MOMENTA:
            start = time.process_time()
            made = CorrelatedNoise.banded(bands, steps=n, momentum=momentum).weights
            seconds = time.process_time() - start
            own = {"formula": CorrelatedNoise.banded(bands).weights, "dpcore": made}
            response = response_of(n, momentum).tolist()
            asked["momenta"].append({"momentum": momentum, "own": own, "response": response, "seconds": seconds})
        found.append(asked)
    return found


def longer_table(asked: list[dict[str, Any]], said: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the third table's lines, and whether dpcore's bands are as good as they must be."""
    lines = ["| steps | bands | momentum | formula | dpcore | JAX Privacy | dpcore, s | JAX Privacy, s |"]
    lines += [f"|{'--:|' * 8}"]
    is_right = True
    for of, by in zip(asked, said, strict=True):
        for each, noise in zip(of["momenta"], by["noise"], strict=True):
            itself = math.exp(log_noise(np.array(each["own"]["dpcore"]), np.array(each["response"]))[0] / 2)
            is_right &= math.isclose(itself, noise["dpcore"], rel_tol=1e-6)
            is_right &= noise["dpcore"] <= min(noise.values()) * (1 + 1e-6)
            over = [f"{noise[name]:.3f} ({noise[name] / noise['formula']:.4f})" for name in ("dpcore", "JAX Privacy")]
            cells = f"{of['n']:,}", of["bands"], each["momentum"], f"{noise['formula']:.3f}", *over
            lines.append(f"| {' | '.join(map(str, cells))} | {each['seconds']:.3f} | {by['seconds']:.1f} |")
    return [*lines, "", "In brackets: over the formula's."], is_right


def main() -> int:
    """Ask the others, print the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help=f"a Python with {', '.join(PACKAGES)}")
    given = parser.parse_args()
    if given.peers is None:
        parser.error(f"--peers is missing: make an environment, pip install {' '.join(PACKAGES)}, and name its python")
    costs = asked_costs()
    runs = asked_runs()
    asked = asked_longer()
    said = ask(given.peers, {"cost": costs, "run": runs, "longer": asked})
    first, is_right = costs_table(costs, said["cost"])
    second = runs_table(runs, said["run"])
    third, is_best = longer_table(asked, said["longer"])
    text = "\n".join([*first, "", *second, "", *third, "", f"By {', '.join(said['versions'])}."])
    print(text)
    write_table(PAGE, BEGIN, text)
    return int(not (is_right and is_best))


if __name__ == "__main__":
    sys.exit(main())
