"""PyVacy at the commit that the paper measured: micro-batches of one."""
