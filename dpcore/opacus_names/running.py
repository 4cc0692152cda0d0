"""Run a script, a module, and the processes that they start, with dpcore under Opacus' name."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from dpcore.opacus_names.alias import PATH

USAGE = "usage: python -m dpcore.as_opacus [--path | SCRIPT | -m MODULE] [ARGUMENT ...]"


def main(arguments: list[str]) -> int:
    """Run a script, and the processes that it starts, with dpcore under Opacus' name.

    Args:
        arguments: The script, or ``-m`` and a module, with its arguments; or ``--path``.

    Returns:
        2 where there is nothing to run.
    """
    if arguments[:1] == ["--path"]:
        print(PATH)
        return 0
    is_module = arguments[:1] == ["-m"]
    if len(arguments) <= is_module or (not is_module and arguments[0].startswith("-")):
        print(USAGE, file=sys.stderr)
        return 2
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PATH), *([before] if before else [])])
    if is_module:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    return 0
