"""Make pages, pictures and numbers of the documentation site, and run its code; not part of the package."""
