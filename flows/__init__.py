"""The run of a study, from its development documents to its report; a run that was killed anywhere can be resumed."""
