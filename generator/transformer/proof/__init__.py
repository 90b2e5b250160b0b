"""The proof, made when a model is loaded, that decoding here gives what transformers' own forward pass gives."""
