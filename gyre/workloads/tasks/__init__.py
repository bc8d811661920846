"""What a job is about: prompts, their answers, and the tokenizer."""
