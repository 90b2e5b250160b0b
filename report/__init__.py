"""Estimates -> figures, tables and one self-contained page. Nothing statistical is computed here.

from report import build_report
build_report(views, study="quickstart", model="kvdrift/tiny", folder=Path("report-out"))
"""

from __future__ import annotations

from report.page import build_report
from report.reading.source import Provenance, ViewSource

__all__ = ["Provenance", "ViewSource", "build_report"]
