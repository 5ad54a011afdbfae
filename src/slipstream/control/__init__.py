"""What a step costs and what speculation then earns: measured profiles and their arithmetic, without tensors."""
