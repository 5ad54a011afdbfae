"""Run in other engines' environments by `benchmarks.export_engines`: requests on standard input, answers on output."""
