"""Figures: their look, what they have in common, and names beside marks."""
