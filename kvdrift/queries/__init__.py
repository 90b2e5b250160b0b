"""Ad hoc SQL: the formats of its rows, and the prompt."""
