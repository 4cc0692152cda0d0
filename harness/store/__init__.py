"""Records, run folders and the cache: what is kept, and whether it is unchanged."""
