"""Estimates -> figures, tables and one self-contained page; nothing statistical is computed here.

``kvdrift.report.page.build_report`` writes the page. Layers, each reading only those below it: ``page`` and
``sections``; ``parts``, one file for each section; ``printing``, printed numbers, tables and figures; ``reading``,
queries of the views. Matplotlib is imported when the first figure is drawn.
"""
