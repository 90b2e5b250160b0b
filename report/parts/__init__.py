"""The parts of the page, each with its figures and tables."""
