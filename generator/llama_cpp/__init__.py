"""llama.cpp in this process, through the compiled library that the package xllamacpp brings."""
