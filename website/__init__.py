"""Build parts of the documentation site, besides ``mkdocs.yml``; not part of the package."""
