"""Attention for recording a prompt and for decoding many streams over one prompt. Knows no study."""
