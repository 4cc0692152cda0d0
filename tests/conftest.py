"""Hypothesis: by default the same examples in every run, so that a failure belongs to a change; ``make test-slow``
looks for new ones (``--hypothesis-profile=explore``)."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")
