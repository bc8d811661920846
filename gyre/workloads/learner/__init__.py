"""What every trained model does, whatever computes it: steps that are made once, repeated, refused and restored."""
