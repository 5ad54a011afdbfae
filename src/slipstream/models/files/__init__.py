"""Reading checkpoint folders."""
