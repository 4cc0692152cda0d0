"""fastDP, book-keeping DP optimisation."""
