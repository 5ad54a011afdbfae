"""What is done with an engine in addition to serving: measure it, advise, audit, examine, convert, hand over,
quantise."""
