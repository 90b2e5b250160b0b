"""Definitions that all packages share: tables, studies, documents, errors."""
