"""From records to tables and figures. Imports pandas and matplotlib only when it is called."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from harness.store.record import Record


def write(records_folder: Path, out: Path, plots: Path) -> list[Path]:
    """Writes all tables of the records below ``records_folder`` into ``out`` and all figures into ``plots``.

    Returns the files written. Raises :class:`harness.errors.BadInput` for no record, a corrupt or newer one, or a
    folder that cannot be written.
    """
    from harness.report import output

    return output.write(records_folder, out, plots)


def show(records: Iterable[Record], console: Console) -> None:
    """Prints the main tables: seconds per epoch, ratio to PyTorch without DP, failed gate checks.

    Raises :class:`harness.errors.BadInput` for no record.
    """
    from harness.report import contents
    from harness.report.formats import terminal

    terminal.show(contents.build(list(records)), console)
