"""Commands by users who have no name, no home and no more rights than to read what is here."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

import pytest

READS_ALL = "+dac_read_search"


def run_as(user: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command as a user, who may read the whole machine (the interpreter may lie in somebody's home). Skips the
    test, with the reason, where nobody may become another."""
    become = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"]
    become += ["--inh-caps", READS_ALL, "--ambient-caps", READS_ALL]
    if shutil.which("setpriv") is None or subprocess.run([*become, "true"], capture_output=True).returncode:
        pytest.skip("only root may become another user here")
    return subprocess.run([*become, *command], env=dict(environment), capture_output=True, text=True)
