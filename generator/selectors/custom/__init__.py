"""Custom selectors, codecs and policies, from modules beside a study file, installed modules or entry points."""
