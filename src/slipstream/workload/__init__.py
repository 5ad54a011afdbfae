"""Questions to ask: prompts by task, from files or from the package."""
