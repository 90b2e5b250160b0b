"""Actions with weights of their own: a second model beside the reference's, with its own prefill and decoding."""
