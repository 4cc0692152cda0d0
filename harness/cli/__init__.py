"""The command line: one file per verb, what they share in options.py."""
