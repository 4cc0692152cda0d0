"""The parent's side of the admission gate: may a contestant be timed?"""
