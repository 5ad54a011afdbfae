"""Counters and times of requests and steps."""
