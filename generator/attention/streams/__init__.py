"""What streams hold and read while they are decoded: slots, suffixes, states, prompts, what rules of caches keep."""
