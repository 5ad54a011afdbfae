"""What learns from served answers: each makes tensors on top of a base drafter that is never replaced."""
