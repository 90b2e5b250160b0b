"""Selectors of one's own: in modules beside a study file, in installed modules, or named by entry points."""
