"""What streams hold while they are decoded: slots, suffixes, states, and what the rules of their caches keep."""
