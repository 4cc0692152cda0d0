"""Inside the builder stage: the locked files, and nothing else, into /opt/env. Standard library only.

``wheels.txt`` and ``sources.txt`` are the two halves of the lock. pip lives outside of the environment that it fills.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

HOUSE = Path("/wheelhouse")
TOOLS = "/tmp/tools/bin/python"
PYTHON = "/opt/env/bin/python"


def main() -> None:
    run("python3", "-m", "venv", "/tmp/tools")
    run("python3", "-m", "venv", "--without-pip", "/opt/env")
    install("wheels.txt", "--only-binary", ":all:")
    # Source archives are built by the setuptools that the lock itself holds: nothing can be fetched for them.
    install("sources.txt", "--no-build-isolation", "--use-pep517")
    # Compiled files that depend on their source alone, not on the time of the build.
    run(PYTHON, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/opt/env/lib", may_fail=True)


def install(lock: str, *options: str) -> None:
    if not (HOUSE / lock).read_text().strip():
        return
    pip = (TOOLS, "-m", "pip", "--python", PYTHON, "install", "--no-index", "--no-cache-dir", "--no-compile")
    run(*pip, "--find-links", str(HOUSE), "--no-deps", "--require-hashes", *options, "-r", str(HOUSE / lock))


def run(*command: str, may_fail: bool = False) -> None:
    """``may_fail``: some packages ship files for other versions of Python, which do not compile."""
    subprocess.run(command, check=not may_fail)


if __name__ == "__main__":
    main()
