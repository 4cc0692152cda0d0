"""Asked of a Python that was found, not made: which modules it has, and every version. ``python -m
harness.worker.unpinned_probe MODULE …`` prints one JSON object. Standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import sys


def main() -> None:
    """``missing``: the modules that cannot be found (none is imported). ``versions``: of every distribution."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    facts = {
        "versions": {"python": platform.python_version(), **dict(sorted(found.items()))},
        "missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
