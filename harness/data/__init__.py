"""The data sets of the tasks: taken from genuine sources, verified, cached once, loaded anywhere.

What is imported here needs the standard library and numpy only, because the worker loads data inside foreign
environments. Fetching lives in ``harness.data.fetch``.
"""

from harness.data.store import Dataset, describe, load

__all__ = ["Dataset", "describe", "load"]
