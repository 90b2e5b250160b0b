"""Document moments to estimates: pure arrays in and out.

This package knows names, arrays and the quantities of ``docs/quantities.md``. It does not know the source of moments
(SQL views) or the destination of estimates (the ``results`` table, figures).
"""
