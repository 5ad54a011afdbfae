"""What is done with an engine beside serving: measure it, advise, audit, examine, convert, hand over, quantise."""
