"""``python -m harness`` is ``dpbench``, also from an unpacked copy in a Python that nobody prepared."""

import importlib.util
import sys

NEEDED = ("numpy", "psutil", "pydantic", "rich", "typer")
"""Enough for ``run gpu``; what reports and accountants need beside them is imported when it is used."""

lacking = [name for name in NEEDED if sys.modules.get(name, name) is None or importlib.util.find_spec(name) is None]
if lacking:
    print(
        f"dpbench: {sys.executable} lacks {', '.join(lacking)}, which the harness itself needs; install them there, or "
        "start dpbench with a Python that has them and name this one by --python.",
        file=sys.stderr,
    )
    sys.exit(2)

from harness.cli.main import main  # noqa: E402

main()
