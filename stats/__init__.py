"""Document moments to estimates: pure arrays in and out.

This package does not know where moments come from (SQL views) or where estimates go (the ``results`` table, figures):
it knows names, arrays and the definitions page.
"""
