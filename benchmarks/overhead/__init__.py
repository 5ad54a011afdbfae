"""What the server costs: tokens a second over HTTP against those of the engine alone."""
