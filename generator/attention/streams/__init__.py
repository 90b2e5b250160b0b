"""The state of streams during decoding: slots, suffixes, states, prompts, and the scores that caches' rules keep."""
