"""Runs over time: series and the events in them."""
