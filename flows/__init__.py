"""A study from its development documents to the report: the remaining work, in order, resumable anywhere."""
