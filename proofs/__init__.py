"""Proofs that are kept beside the tests: each compares this tree with what was true before a change."""
