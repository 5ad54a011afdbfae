"""Replicas: a simulation of the router, and a soak of real ones."""
