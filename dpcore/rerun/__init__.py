"""Running a module once more without leaving a trace: its state, random numbers and side effects are put back."""
