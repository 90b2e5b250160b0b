"""A study file run as a whole: what is left of its studies, who generates for them, and their stages in order."""
