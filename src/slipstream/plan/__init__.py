"""Whether a model fits: every byte that it will hold, planned before anything is loaded."""
