"""The streams of a side that is a server, kept as whole histories or in the slots of llama-server."""
