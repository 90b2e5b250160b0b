"""Commands that write study files."""
