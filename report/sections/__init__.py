"""The sections of the page, each with its figures and tables."""
