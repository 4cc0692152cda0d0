"""Two states of the code against each other, in pairs."""
