"""The page of several stores side by side."""
