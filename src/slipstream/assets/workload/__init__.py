"""Workloads: prompts by task, from files or from the package."""
