"""Measuring engines in this process."""
