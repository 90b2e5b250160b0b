"""What commands do while a study moves: they show it, and keep up what is made from it."""
