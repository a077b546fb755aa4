"""The tiers below the engine's cache: host memory, and what an operator configures below it."""
