"""A prompt under a transformer: prefilled once, evicted for each action, and made ready for decoding."""
