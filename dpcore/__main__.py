"""A calculator, and a report: ``python -m dpcore`` and one of epsilon, sigma, plan and report.

    python -m dpcore epsilon --n 60000 --batch 256 --sigma 1.1 --epochs 15
    python -m dpcore sigma --n 60000 --batch 256 --epsilon 3 --epochs 15
    python -m dpcore plan --n 60000 --epsilon 3 --batches 256 1024 4096 --epochs 5 15 45 --plot plan.svg
    python -m dpcore report checkpoint.pt --out privacy.html

For Poisson batches and neighbours that differ by one example added or removed, or as ``--sampling`` says.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcore.accountants import create_accountant, get_noise_multiplier
from dpcore.accountants.accountant import count
from dpcore.accountants.utils import count_steps, counted_as, customary_delta
from dpcore.arguments import check_number
from dpcore.plan import choices, plan_figure
from dpcore.privacy_report import report_of_checkpoint

SAMPLING: dict[str, Any] = {
    "default": "poisson",
    "choices": ("poisson", "bins", "shuffle"),
    "help": "how batches are drawn: poisson (the default), bins or shuffle",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dpcore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("epsilon", "what a training run spends"), ("sigma", "the smallest noise for a budget")):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--n", type=int, required=True, help="number of examples")
        command.add_argument("--batch", type=float, required=True, help="expected batch size; the rate is batch / n")
        if name == "epsilon":
            command.add_argument("--sigma", type=float, required=True, help="noise multiplier")
        else:
            command.add_argument("--epsilon", type=float, required=True, help="the budget")
        length = command.add_mutually_exclusive_group(required=True)
        length.add_argument("--epochs", type=float, help="rounds of ceil(n / batch) steps")
        length.add_argument("--steps", type=int, help="steps, in place of epochs")
        command.add_argument("--delta", type=float, help="default: the largest power of ten below 1 / n")
        command.add_argument("--accountant", default="prv", help="prv (tight, the default), rdp or gdp")
        command.add_argument("--sampling", **SAMPLING)
    what = "the noise for a budget, over sizes of batches and lengths of training"
    plan = commands.add_parser("plan", help=what, description=what)
    plan.add_argument("--n", type=int, required=True, help="number of examples")
    plan.add_argument("--epsilon", type=float, required=True, help="the budget")
    plan.add_argument("--delta", type=float, help="default: the largest power of ten below 1 / n")
    plan.add_argument("--batches", type=float, nargs="+", help="default: 256 and fourfold, up to n")
    plan.add_argument("--epochs", type=float, nargs="+", default=[5, 15, 45], help="default: 5 15 45")
    plan.add_argument("--sampling", **SAMPLING)
    plan.add_argument("--plot", type=Path, help="a file for the figure, .svg")
    what = "one page about the privacy of a run: what is promised, what attacks can reach, what is not covered"
    report = commands.add_parser("report", help=what, description=what)
    report.add_argument("checkpoint", help="a file of PrivacyEngine.save_checkpoint")
    report.add_argument("--out", type=Path, help="a file for the page, .html or .md; otherwise it is printed")
    return parser


def answer(options: argparse.Namespace) -> str:
    """Return the sentence about a run with these options.

    Raises:
        ValueError: a number is out of its range.
    """
    check_number("--n", options.n, lambda n: n >= 1, "it must be at least 1")
    check_number(
        "--batch", options.batch, lambda b: 0.0 < b <= options.n, f"it must lie in (0, n], n being {options.n}"
    )
    rate = options.batch / options.n
    steps = count_steps(rate, options.epochs, options.steps)
    delta = _delta(options)
    accountant = create_accountant(options.accountant)
    if options.command == "sigma":
        check_number("--epsilon", options.epsilon, lambda e: e > 0.0, "it must be above 0")
        sigma = get_noise_multiplier(
            target_epsilon=options.epsilon,
            target_delta=delta,
            sample_rate=rate,
            epochs=options.epochs,
            steps=options.steps,
            accountant=options.accountant,
            sampling=options.sampling,
        )
        sigma = math.ceil(sigma * 1e6) / 1e6  # never below what the budget needs
    else:
        sigma = check_number("--sigma", options.sigma, lambda s: s >= 0.0, "it must be at least 0")
    count(accountant, sigma, *counted_as(options.sampling, rate, options.epochs, options.steps))
    epsilon = accountant.get_epsilon(delta)
    shown = math.ceil(epsilon * 1e4) / 1e4 if math.isfinite(epsilon) else epsilon  # rounded up: it is a bound
    found = f"epsilon {shown:.4f} at delta {delta:g}"
    if delta > 1 / options.n:
        found += f" (above 1 / n = {1 / options.n:.3g}: such a promise allows to publish one example whole)"
    drawn = "" if options.sampling == "poisson" else f", sampling {options.sampling}"
    run = f"n {options.n}, batch {options.batch:g} (rate {rate:.6g}), {steps} steps{drawn}"
    run += f", accountant {options.accountant}"
    return f"sigma {sigma:.6f}: {found}\n{run}" if options.command == "sigma" else f"{found}\n{run}, sigma {sigma:g}"


def _delta(options: argparse.Namespace) -> float:
    delta = customary_delta(options.n) if options.delta is None else options.delta
    return check_number("--delta", delta, lambda d: 0.0 < d < 1.0, "it must lie in (0, 1), and well below 1 / n")


def print_plan(options: argparse.Namespace) -> None:
    """Print a table of the noise for a budget, row by row as it is found, and draw it.

    Raises:
        ValueError: a number is out of its range.
    """
    n, plot = options.n, options.plot
    check_number("--n", n, lambda n: n >= 1, "it must be at least 1")
    if plot is not None and plot.suffix != ".svg":
        raise ValueError(f"--plot is {str(plot)!r}; it must end with .svg.")
    batches = options.batches or [b for b in (256.0 * 4**k for k in range(12)) if b <= n] or [float(n)]
    for batch in batches:
        check_number("--batches", batch, lambda b: 0.0 < b <= n, f"each must lie in (0, n], n being {n}")
    delta = _delta(options)
    print(f"noise multiplier for epsilon {options.epsilon:g} at delta {delta:g}, {n} examples")
    print(f"{'batch':>10} {'epochs':>8} {'steps':>9} {'sigma':>9}  noise of an update / max_grad_norm")
    found = []
    for choice in choices(n, options.epsilon, delta, batches, options.epochs, options.sampling):
        found.append(choice)
        shown = f"{math.ceil(choice.sigma * 1e4) / 1e4:9.4f}  {choice.noise:.3g}"
        print(f"{choice.batch:10g} {choice.epochs:8g} {choice.steps:9} {shown}", flush=True)
    if plot is not None:
        title = f"Noise for epsilon {options.epsilon:g}, delta {delta:g}, n {n:,}"
        plot.write_text(plan_figure(found, title), encoding="utf-8")
        print(f"the figure is in {plot}")


def print_report(options: argparse.Namespace) -> None:
    """Print the page about a checkpoint, or write it.

    Raises:
        ValueError: the file is no checkpoint of a run, or the page's name has another ending.
    """
    found = report_of_checkpoint(options.checkpoint)
    if options.out is None:
        print(found)
        return
    found.save(options.out)
    print(f"{found.promise}\nthe page is in {options.out}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the answer to ``arguments``; bad input ends with one sentence and the exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "plan":
            print_plan(options)
        elif options.command == "report":
            print_report(options)
        else:
            print(answer(options))
    except (ValueError, OSError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
