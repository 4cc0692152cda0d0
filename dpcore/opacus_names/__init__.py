"""Hold Opacus' own spelling: the private names that software built on it reads, calls and overrides."""
