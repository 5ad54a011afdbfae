"""Run in other engines' environments by `benchmarks.export_parsers`: cases on standard input, verdicts on output."""
