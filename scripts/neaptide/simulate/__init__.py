"""PyTorch's CUDA caching allocator without a device: what a trace or a prefill ladder makes it reserve."""
