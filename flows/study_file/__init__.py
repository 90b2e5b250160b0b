"""A study file run as a whole: who generates for it, and its run."""
