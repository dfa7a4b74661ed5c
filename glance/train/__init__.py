"""Training a block head on any frozen target, from the target's own greedy text and states."""
