"""What an optimizer step is made of on Megatron: packed samples, log-probs over a split vocabulary, gradients."""
