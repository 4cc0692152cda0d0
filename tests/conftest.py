"""Hypothesis: by default the same examples in every run, so that a failure belongs to a change; ``make test-slow``
looks for new ones (``--hypothesis-profile=explore``). And every process of pytest-xdist on processors of its own."""

import os

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several test processes its share of the processors.

    Workers are pinned to the first processors that they may use, which are the same ones for all test processes: a
    processor would idle, and tests would disturb each other's clocks.
    """
    if not hasattr(config, "workerinput") or not hasattr(os, "sched_setaffinity"):
        return
    number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, allowed[number % count :: count] or allowed)
