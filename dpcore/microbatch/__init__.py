"""One physical micro-batch: how long it is, where its examples lie, and the clipped sum that it adds."""
