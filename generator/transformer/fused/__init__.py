"""A decoding step of a decoder's layers in few operations: each is one launch on CUDA, and plain torch elsewhere."""
