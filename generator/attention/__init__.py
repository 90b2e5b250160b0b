"""Attention that records a prompt, and attention of many streams to one prompt; nothing here knows a study."""
