"""Everything that runs inside a framework's own environment. Standard library and numpy only."""
