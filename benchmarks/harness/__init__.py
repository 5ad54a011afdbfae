"""What benchmarks have in common: command line, kept cells, other processes, turns, larger models, pages, pictures."""
