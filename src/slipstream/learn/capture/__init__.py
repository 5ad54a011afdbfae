"""How records come about: what a step checked, reduced beside the engine's thread, and traces for a replay."""
