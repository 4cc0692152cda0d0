"""Every test runs the pure torch rules, whatever this machine has compiled; test_native.py is about the kernels."""

import os

os.environ["DPCORE_NATIVE"] = "0"
