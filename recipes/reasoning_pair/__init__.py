"""Make a pair that reasons: problems with written steps, a target that is good at them and a draft that is not."""
