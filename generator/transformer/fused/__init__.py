"""A decoder's layers in few operations for a step of decoding: each is one launch on CUDA, and plain elsewhere."""
