"""Tests of the library dpcore."""
