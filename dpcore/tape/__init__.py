"""The recording of one forward and backward pass: every use of a parameter, its input, its output's gradient."""
