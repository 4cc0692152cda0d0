"""``import dpcore.as_opacus``: every ``import opacus`` behind it gets dpcore, in libraries that nobody can edit, too.

    import dpcore.as_opacus              # the first line of a script
    python -m dpcore.as_opacus SCRIPT    # a script that is not to be changed; or -m MODULE
    PYTHONPATH=$(python -m dpcore.as_opacus --path) COMMAND    # whatever starts its own processes

Where Opacus itself was imported before it is an ImportError. ``with installed():`` is for tests: within a block alone.
"""

import sys

from dpcore.opacus_names.alias import install, installed, is_installed, undo
from dpcore.opacus_names.running import main

__all__ = ["install", "installed", "is_installed", "undo"]

install()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
