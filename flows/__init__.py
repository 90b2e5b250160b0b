"""A study from its development documents to the report: what is still to do, done in order, resumable anywhere."""
