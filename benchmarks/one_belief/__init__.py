"""A candidate for the policy that chooses K; docs/decisions/0015-one-belief.md."""
