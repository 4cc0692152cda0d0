"""JAX Privacy at a commit of 2026: its trainer."""
