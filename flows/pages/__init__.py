"""The pages of stored studies, and the page that has several of them side by side."""
