"""Measuring servers from their clients' side."""
