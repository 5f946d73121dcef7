"""Draft trees: what follows from their parents, and ways to choose them."""
