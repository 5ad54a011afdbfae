"""Replicas of one engine behind a router: who answers a request, and who goes on with it."""
