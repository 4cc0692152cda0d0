"""From records to frames, and from frames to statistics. Pure functions."""
