"""What the page says of sequential studies."""
