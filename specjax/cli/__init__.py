"""The command line. jax is imported only after the arguments are checked."""
