"""Embedding rows: where they live, how they learn, how they are pruned and spilled."""
