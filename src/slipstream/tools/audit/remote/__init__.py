"""Audits of OpenAI-compatible servers, through their interface alone."""
