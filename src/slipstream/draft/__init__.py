"""Everything that guesses ahead: one file a drafter."""
