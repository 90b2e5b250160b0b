"""Ad hoc SQL as people meet it: the formats of its rows, and the prompt."""
