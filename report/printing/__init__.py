"""Printed numbers, tables, figures and LaTeX; this package reads no views."""
