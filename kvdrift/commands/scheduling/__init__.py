"""Commands that have a scheduler run studies."""
