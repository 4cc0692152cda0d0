"""Progress of a run, as people see it: one bar, what is being done now, and lines that stay."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from harness.run.remaining import Key, Remaining, about, clock

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

LONGEST_WORD = 80
"""Characters of a worker's event that are shown."""

Outcome = TypeVar("Outcome")


class Progress:
    """A line for each finished piece, and below them, in a terminal, a bar. It is redrawn twice a second only: the
    harness must not be the foreign load that it looks for."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self._text = ""
        self._done = 0
        self._keys: Sequence[Key] = ()
        self._remaining = Remaining()
        self._began = self._piece_began = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # Ours and not rich's, which counts what was there already and looks at the last half minute only.
            TextColumn("{task.fields[left]}"),
            # What a contestant says is no markup of ours.
            TextColumn("{task.fields[now]}", markup=False),
            console=console,
            refresh_per_second=2,
            disable=quiet or not console.is_terminal,
        )
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, pieces: int | Sequence[Key], title: str = "measure") -> None:
        """Start a new bar. ``pieces``: how many there are, or the key of each, so that the time left can be told."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._keys = [()] * pieces if isinstance(pieces, int) else pieces
        self._task = self._bar.add_task(title, total=len(self._keys), now="", left="")
        self._done, self._remaining = 0, Remaining()
        self._began = self._piece_began = time.monotonic()

    def extend(self, pieces: Sequence[Key]) -> None:
        """Add pieces to the bar that was begun."""
        self._keys = [*self._keys, *pieces]
        self._bar.update(self._task, total=len(self._keys))

    def doing(self, text: str) -> None:
        self._text = text
        self._piece_began = time.monotonic()
        self._bar.update(self._task, now=text)

    def event(self, event: dict[str, Any]) -> None:
        """A worker's event: what it is at, or the last line that it has printed."""
        if event.get("event") in ("phase", "log"):
            said = str(event.get("phase") or event.get("text"))
            said = "".join(letter for letter in said if letter.isprintable())[:LONGEST_WORD]
            self._bar.update(self._task, now=f"{self._text} · {said}")

    def done(self, outcome: str, counts: bool = True, seconds: float | None = None) -> None:
        """A piece has ended. ``outcome``: its result in few words; ``counts``: whether its time tells of others, which
        it does not where it was measured before, or beside others. ``seconds``: that it took, if not since the last."""
        now = time.monotonic()
        if counts:
            self._remaining.add(self._keys[self._done], now - self._piece_began if seconds is None else seconds)
        self._done += 1
        seconds = self._remaining.seconds(self._keys[self._done :])
        left = "" if not seconds else f"{about(seconds)} left"
        self._bar.update(self._task, advance=1, left=left)
        if not self.quiet:
            number = f"{self._done:>{len(str(len(self._keys)))}}/{len(self._keys)}"
            tail = f" ({clock(now - self._began)}{', ' + left if left else ''})"
            self.log(f"[{number}] {self._text}: {outcome}{tail}")

    def log(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def watched(execute: Callable[[Progress], Outcome], folder: Path, console: Console, quiet: bool) -> Outcome:
    """Return what ``execute`` returns, with its progress shown; after Ctrl-C, or where somebody asks this process to
    end, the sentence how to go on, and the exit."""
    try:
        with _ended_in_order(), Progress(console, quiet=quiet) as progress:
            return execute(progress)
    except KeyboardInterrupt as how:
        sentence = f"Stopped. What was measured is in {folder}; the same command goes on from there."
        console.print(sentence, markup=False, highlight=False)
        raise typer.Exit(how.args[0] if how.args else INTERRUPTED) from None


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C: what is under way is ended, and the exit code is that of a shell."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    mine = {number: former for number, former in before.items() if former is signal.SIG_DFL}  # nohup ignores SIGHUP
    try:
        for number in mine:
            signal.signal(number, stop)
        yield
    finally:
        for number, former in mine.items():
            signal.signal(number, former)
