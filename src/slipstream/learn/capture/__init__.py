"""How records come about: what a step checked, reduced concurrently with the engine's thread, and traces for a
replay."""
