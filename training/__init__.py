"""How the embedded model's checkpoint was made; not part of the installed package."""
