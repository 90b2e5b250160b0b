"""The page that holds several studies side by side."""
