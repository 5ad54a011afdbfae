"""The drafter keeps learning from what is served: records of answers, versions of weights, and what decides on them."""
