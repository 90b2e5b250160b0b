"""Figures: their style, shared drawing functions, and names beside marks."""
