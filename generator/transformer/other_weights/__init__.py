"""Actions with weights of their own: a second model beside the reference's, which prefills and decodes by itself."""
