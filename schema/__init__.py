"""What an event, a document and a unit is, and the append-only store that holds them."""
