"""The comparison of several stores: the documents that they share, and differences over these documents."""
