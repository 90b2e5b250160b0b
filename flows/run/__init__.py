"""The run of a study file: the remaining work, the generators, and the stages in order."""
