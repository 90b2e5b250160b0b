"""Estimates -> figures, tables and one self-contained page; nothing statistical is computed here.

``report.page.build_report`` writes the page. Layers, each reading only those below it: ``page`` and ``sections``;
``parts``, one file a section; ``printing``, numbers, tables and figures in print; ``reading``, what the views say.
Matplotlib is imported when the first figure is drawn.
"""
