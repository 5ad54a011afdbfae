"""What hostile clients do to a server: how long others wait meanwhile, what memory it takes, what the log says."""
