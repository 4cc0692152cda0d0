"""``python -m harness`` is ``dpbench``."""

from harness.cli import main

main()
