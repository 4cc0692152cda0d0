"""Times inside a user's own test suite, for the pytest plugin."""
