"""How the embedded pair of models was trained, and how good it is."""
