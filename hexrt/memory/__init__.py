"""Pages of KV cache and tensors: `pool` counts frames and keeps page tables."""
