"""Makes virtual environments: by uv where it can be found, by pip elsewhere and where uv fails.

uv unpacks a package once and links it into every environment, so that three of them with torch take the room of one and
a second instead of forty. It does not read pip's configuration, which says where a company's packages are: what pip is
told is told to uv, and where pip is told something that uv has no word for, pip installs.

Run as ``python -m harness.environments.installer FOLDER ARGUMENTS``, by the Makefile too, before anything is installed:
this file needs the standard library alone.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from harness.environments.orphans import dying_with_parent

AS_UV_SAYS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
"""An option of pip -> uv's variable, and what separates its values."""
OF_NO_MATTER = {
    "cache-dir",
    "config-file",
    "disable-pip-version-check",
    "no-color",
    "no-input",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "user",
    "verbose",
}
"""Options of pip that change nothing of what is installed."""
LINE = re.compile(r"(?P<place>:env:|[\w-]+)\.\.?(?P<option>[\w-]+)=(?P<value>.*)")


def install(
    folder: Path, arguments: Sequence[str], output: IO[str], environment: Mapping[str, str], compiled: bool
) -> int:
    """Install into a virtual environment.

    Args:
        folder: of the environment, which is there.
        arguments: of ``pip install``.
        output: what the installers say.
        environment: their variables.
        compiled: whether Python's bytecode is made for all files now; else by the first process that reads a file.

    Returns:
        The exit code of the last installer that was tried.
    """
    python = str(folder / "bin" / "python")
    told = uv_variables(environment)
    uv = shutil.which("uv", path=os.pathsep.join((f"{sys.prefix}/bin", environment.get("PATH", os.defpath))))
    if uv is not None and told is not None:
        # As pip: of all indexes the best version, and what the machine has for this Python.
        options = ["--quiet", "--python", python, "--index-strategy", "unsafe-best-match"]
        options += ["--compile-bytecode"] if compiled else []
        if _run([uv, "pip", "install", *options, *arguments], output, {**environment, **told}) == 0:
            return 0
        print("uv could not; now pip.", file=output, flush=True)
    pip = [python, "-I", "-m", "pip"]
    if _run([*pip, "--version"], output, environment):
        _run([python, "-I", "-m", "ensurepip"], output, environment)
    return _run([*pip, "install", "--disable-pip-version-check", "--quiet", *arguments], output, environment)


def uv_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return what pip is told, by its files and variables, in uv's variables; None where uv has no word for it.

    Args:
        environment: variables.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if said.returncode:
        return None
    found: dict[str, str] = {}
    # Of an option's values pip heeds its variable's.
    for line in sorted(said.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        match = LINE.fullmatch(line)
        if match is None or match["option"] in OF_NO_MATTER or match["place"] not in (":env:", "global", "install"):
            continue
        if match["option"] not in AS_UV_SAYS:
            return None
        variable, between = AS_UV_SAYS[match["option"]]
        found[variable] = between.join(str(ast.literal_eval(match["value"])).split())
    return found


def make(folder: Path, interpreter: str, output: IO[str], environment: Mapping[str, str]) -> int:
    """Make an environment with nothing in it, and return the exit code. ``interpreter``: the Python that it has."""
    return _run([interpreter, "-I", "-m", "venv", "--without-pip", str(folder)], output, environment)


def _run(command: Sequence[str], output: IO[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(
        dying_with_parent(list(command)),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=dict(environment),
    ).returncode


def main(folder: str, *arguments: str) -> int:
    """Make the environment where it is missing, install into it, and return the exit code."""
    place, variables = Path(folder).absolute(), dict(os.environ)
    if not (place / "bin" / "python").exists():
        code = subprocess.call([sys.executable, "-m", "venv", str(place)])
        if code:
            return code
    return install(place, arguments, sys.stdout, variables, compiled="--no-compile" not in arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
