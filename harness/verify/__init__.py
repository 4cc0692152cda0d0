"""Packs of others: is every number that can be made again what its record says, and does the gate agree here?"""
