"""Estimates -> figures, tables and one self-contained page; nothing statistical is computed here.

``kvdrift.report.page.build_report`` writes the page. Layers, each reading only those below it: ``page``; ``sections``,
a function for each section, and ``explorer``; ``printing``, numbers, tables and HTML; ``figures``; ``reading``, queries
of the views. Matplotlib is imported when the first figure is drawn.
"""
