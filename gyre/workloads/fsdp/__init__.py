"""FSDP2 as the trainer: any causal language model of transformers, its parameters, gradient and optimizer sharded over
the ranks.

The same code runs on GPUs over NCCL and on CPUs over Gloo. It needs transformers; naming this package imports neither
it nor torch.
"""
