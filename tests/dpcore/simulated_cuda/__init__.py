"""A simulated CUDA device for machines without a GPU: tensors say "cuda", and the CPU computes their values.

It shows that code takes the branches that it takes on a GPU, with true values; numpy refuses the tensors; every read by
the host, every upload, operator and allocation is counted. It cannot show times, the rounding of CUDA's own kernels, or
races between streams, because everything runs at once and in order.
"""
