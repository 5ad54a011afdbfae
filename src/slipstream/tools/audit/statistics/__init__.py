"""Exact and anytime-valid tests of an audit. Arrays in, plain numbers out: nothing here knows of servers."""
