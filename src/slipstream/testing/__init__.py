"""Public fakes, exact enumeration and the drafter conformance kit."""
