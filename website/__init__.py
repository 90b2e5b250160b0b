"""What makes the site of the documents, beside ``mkdocs.yml``; not in the package."""
