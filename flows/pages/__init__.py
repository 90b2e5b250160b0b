"""The pages of stored studies, and the page that compares several studies."""
