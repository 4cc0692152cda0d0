"""A calculator: ``python -m dpcore epsilon`` of a training run, and ``python -m dpcore sigma`` for a budget.

    python -m dpcore epsilon --n 60000 --batch 256 --sigma 1.1 --epochs 15
    python -m dpcore sigma --n 60000 --batch 256 --epsilon 3 --epochs 15

For Poisson batches and neighbours that differ by one example added or removed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from dpcore.accountants import create_accountant, get_noise_multiplier
from dpcore.accountants.accountant import count
from dpcore.accountants.utils import count_steps, customary_delta
from dpcore.arguments import check_number


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
    delta = customary_delta(options.n) if options.delta is None else options.delta
    check_number("--delta", delta, lambda d: 0.0 < d < 1.0, "it must lie in (0, 1), and well below 1 / n")
    accountant = create_accountant(options.accountant)
    if options.command == "sigma":
        check_number("--epsilon", options.epsilon, lambda e: e > 0.0, "it must be above 0")
        sigma = get_noise_multiplier(
            target_epsilon=options.epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=options.accountant,
        )
        sigma = math.ceil(sigma * 1e6) / 1e6  # never below what the budget needs
    else:
        sigma = check_number("--sigma", options.sigma, lambda s: s >= 0.0, "it must be at least 0")
    count(accountant, sigma, rate, steps)
    epsilon = accountant.get_epsilon(delta)
    shown = math.ceil(epsilon * 1e4) / 1e4 if math.isfinite(epsilon) else epsilon  # rounded up: it is a bound
    found = f"epsilon {shown:.4f} at delta {delta:g}"
    if delta > 1 / options.n:
        found += f" (above 1 / n = {1 / options.n:.3g}: such a promise allows to publish one example whole)"
    run = f"n {options.n}, batch {options.batch:g} (rate {rate:.6g}), {steps} steps, accountant {options.accountant}"
    return f"sigma {sigma:.6f}: {found}\n{run}" if options.command == "sigma" else f"{found}\n{run}, sigma {sigma:g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the answer to ``arguments``; bad input ends with one sentence and the exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        print(answer(options))
    except ValueError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
