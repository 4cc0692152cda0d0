"""dpcore beside Opacus: traps that either falls into, and accuracy at equal settings."""
