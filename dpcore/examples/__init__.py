"""Scripts of ordinary users: ``python -m dpcore.examples.NAME --help``."""
