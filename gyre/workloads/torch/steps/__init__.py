"""What an optimizer step is made of: padded samples, gradients, their sums over micro-batches and ranks, updates."""
