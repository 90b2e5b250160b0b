"""Generate with other engines: the interface that an adapter implements, and the model that kvdrift builds on it."""
