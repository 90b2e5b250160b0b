"""Custom selectors, codecs and policies: in modules beside a study file, in installed modules, or by entry points."""
