"""A study's plan: made from development documents, frozen in the store, and followed by interim looks."""
