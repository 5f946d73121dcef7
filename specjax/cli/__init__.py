"""The command line. jax is imported only once the arguments are known to be right."""
