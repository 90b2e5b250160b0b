"""What the report reads from the views: facts, estimates, quantities, published values."""
