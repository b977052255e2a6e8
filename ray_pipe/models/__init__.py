"""Models as sequences of blocks that can be cut."""
