"""Events and documents that another generator made: reading, checking, appending."""
