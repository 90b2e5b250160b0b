"""The page that compares several stores."""
