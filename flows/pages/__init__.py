"""The pages of stored and of running studies, and the page that compares several studies."""
