"""A bar for the loop that tells what was spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from dpcore.accountants.utils import rounded_up
from dpcore.errors import UnsupportedError
from dpcore.spending import Spending

SECONDS = 5.0
"""Between two readings of epsilon, which take some hundredths of a second each."""


def progress(spending: Spending, loader: Any, delta: float | None) -> Iterator[Any]:
    """Yield the batches of ``loader`` behind a bar of tqdm, which ends with epsilon after the last of them."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise UnsupportedError(
            "engine.progress draws its bar by the package tqdm, which is not here: pip install tqdm."
        ) from error
    delta = spending.delta if delta is None else delta

    def epsilon() -> str:
        return f"epsilon {rounded_up(spending.accountant.get_epsilon(delta))} at delta {delta:g}"

    last = time.monotonic()
    with tqdm(total=len(loader), unit="batch") as bar:
        for batch in loader:
            yield batch
            if time.monotonic() - last > SECONDS:
                bar.set_postfix_str(epsilon(), refresh=False)
                last = time.monotonic()
            bar.update()
        bar.set_postfix_str(epsilon())
