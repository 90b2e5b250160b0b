"""The interfaces of servers: the requests for each kind, and the laws in its answers."""
