"""What tests need to run verl without a GPU."""
