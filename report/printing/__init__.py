"""Printed numbers and tables; this package reads no views."""
