"""Numbers, tables, figures and LaTeX in print; nothing is read here."""
