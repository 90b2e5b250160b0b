"""Events and documents of other generators: reading, checking, appending."""
