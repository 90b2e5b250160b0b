"""The streams of a side that is a server, as whole histories or as the slots of llama-server."""
