"""Runs the Python code in its first argument: ``python -m tests.frameworks.run_code CODE``, in an environment."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
