"""Alarms: what changed in acceptance, and why."""
