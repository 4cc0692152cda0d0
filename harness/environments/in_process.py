"""Workers inside this very process, for tests of the harness."""

from __future__ import annotations

from harness.environments.backend import AnyContestant, Log
from harness.environments.executor import WORKER, Executor, InProcess
from harness.environments.unavailable import Unavailable
from harness.environments.venv import VenvBackend


class InProcessBackend(VenvBackend):
    """No isolation and no limits; tools that need PyTorch run in its virtual environment all the same."""

    def executor(self, contestant: AnyContestant, log: Log, module: str = WORKER) -> Executor | Unavailable:
        return InProcess(module)
