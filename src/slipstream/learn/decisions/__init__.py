"""What decides on a version: the judge, the live comparison, and the operator."""
