"""Attention over our pages on a CUDA device, in Triton: the implementation that needs nothing but torch's own compiler.

Owns three kernels and their scratch: one puts a pass's K and V where `slots` says, one attends for the rows of one token, one for prompt
slices. Grids come from the sizes of the buffers and never from what is in them, so a pass can be captured as a CUDA graph; rows without a
token and tokens without a slot do nothing. Sums run in an order that depends on a sequence alone: what a row gets is the same, bit for
bit, whatever stands beside it. Used by the host programs, on the thread that owns the stream.

    arena [frame, layer, K or V, token in page, KV head, d], strided over frames; all offsets over frames have 64 bits
    one token rows   program (row, KV head, split): SPLIT_TOKENS keys for all query heads of the group; then (row, head) adds the splits up
    slices           program (block of queries, KV head): all its keys, causal; a block's row is searched for in `starts`

The split over keys and its sum are Flash-Decoding (Dao et al. 2023); the running softmax is Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018.
"""

from __future__ import annotations
