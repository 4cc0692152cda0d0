"""The committed results: which runs there are, which of them hold today, and the tables that pages show of them."""
