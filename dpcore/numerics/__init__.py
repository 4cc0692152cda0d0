"""Floating-point arithmetic: bounds of rounding errors, and the precision that matrix products have."""
