"""Small networks on top of a frozen target that guess its next tokens: the modules and their checkpoints."""
