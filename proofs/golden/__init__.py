"""The golden set: what must not change while code is cut."""
