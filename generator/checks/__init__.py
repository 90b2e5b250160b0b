"""Checks that every selector, codec and policy must pass, run by ``kvdrift check`` and by the tests."""
