"""Functions that torch.compile has made of parts of a model, while a tape is open: they run as they are.

The compiler would trace the recording, for every batch anew, and take what it notes on the way for constants. What is
done here is what ``torch.compiler.set_stance("force_eager")`` does, whose own checks take as long as a small layer.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

COMPILER = "torch._dynamo.eval_frame"
"""Where the stance is: nothing is compiled before that is there, and to import it takes long."""


class _CompiledFunctions:
    """The compiler's stance, which is one for the process: from the first tape that is opened to the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._before: Any = None

    def open(self) -> None:
        """Note that a tape records."""
        with self._lock:
            self._open += 1
            compiler: Any = sys.modules.get(COMPILER)
            if self._open == 1 and hasattr(compiler, "_stance") and hasattr(compiler, "DynamoStance"):
                self._before = compiler._stance
                compiler._stance = compiler.DynamoStance("force_eager")

    def close(self) -> None:
        """End what :meth:`open` began."""
        with self._lock:
            self._open -= 1
            if not self._open and self._before is not None:
                compiler: Any = sys.modules[COMPILER]
                compiler._stance, self._before = self._before, None


COMPILED_FUNCTIONS = _CompiledFunctions()
