"""Attention that records a prompt, and attention of many streams to one prompt; this package knows no studies."""
