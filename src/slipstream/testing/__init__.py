"""Stub drafters, table models, exact enumeration and the drafter conformance kit."""
