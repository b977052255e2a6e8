"""How many examples a property is tried with: all in the profile `thorough`, else a quarter."""

from __future__ import annotations

from hypothesis import settings

ALL_EXAMPLES = 100
"""Of a property that says nothing else, in `make test-thorough`."""


def examples(thorough: int) -> int:
    """For `@settings(max_examples=...)`: the share of `thorough` that the profile asks for."""
    return max(1, thorough * settings().max_examples // ALL_EXAMPLES)
