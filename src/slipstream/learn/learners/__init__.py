"""What learns from served answers: each makes tensors on top of a floor that is never replaced."""
