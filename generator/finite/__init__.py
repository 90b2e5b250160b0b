"""Systems small enough to write down: laws as tables, their exact quantities, and the generator's view of them."""
