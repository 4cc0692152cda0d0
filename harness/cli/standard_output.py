"""Standard output whose reader may leave, as ``head`` does, or whose disk may be full."""

from __future__ import annotations

import io
import locale
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from harness.cli.options import BAD_INPUT
from harness.errors import BadInput

READER_LEFT = 141
"""Exit code: what a shell says of a process that SIGPIPE ended."""


class _Watched:
    """A stream that ends the process at once where nobody reads it any more, silently, or where it cannot be written,
    with one sentence.

    Click and rich end with 1 then, which here is a finding. They let SystemExit pass.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._ending():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._ending():
            self._stream.flush()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._discard()
            raise SystemExit(READER_LEFT) from None
        except OSError as error:
            self._discard()
            with suppress(OSError):  # both may go to the same full disk
                print(
                    f"dpbench: Standard output cannot be written ({error.strerror}); make room, or send it elsewhere.",
                    file=sys.stderr,
                    flush=True,
                )
            raise SystemExit(BAD_INPUT) from None

    def _discard(self) -> None:
        """Send to nowhere what is still in the buffer, which is written when the interpreter ends."""
        with suppress(OSError, io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def prepare() -> None:
    """Make what every verb takes for granted, whatever started it: three open streams (a service may close them, and a
    file would get their number), texts in UTF-8 whatever the locale says, and a working directory.

    Raises:
        BadInput: the working directory is gone.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode))
    if locale.getencoding().lower().replace("-", "") != "utf8" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    try:
        os.getcwd()
    except OSError:
        raise BadInput("The working directory is gone; change to one that is there.") from None


@contextmanager
def watched() -> Iterator[None]:
    """Within, a reader of standard output who left ends the process with :data:`READER_LEFT`, whatever else happened:
    the reader left before the verdict. What the encoding of a terminal lacks (cron, latin-1) is written as ``?``."""
    for each in (sys.stdout, sys.stderr):
        if isinstance(each, io.TextIOWrapper):
            each.reconfigure(errors="replace")
    stream = _Watched(sys.stdout)
    with redirect_stdout(cast(TextIO, stream)):
        try:
            yield
        finally:
            stream.flush()
