"""The state of streams during decoding: slots, suffixes, states, and the scores that rules of their caches keep."""
