"""Plans: where to cut the model, what a step will cost."""
