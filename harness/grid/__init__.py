"""Many machines: a plan cut into units, each of which leaves one run folder on one machine, and an engine that ML teams
have (Slurm, Ray) to hand them out. What counts is decided by files alone."""
