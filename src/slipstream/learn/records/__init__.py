"""Records of served answers: what they hold, who may be learned from, and which of them are learned from."""
