"""The model in Megatron-core: configuration, ranks, devices, and weights in and out by Hugging Face's names."""
