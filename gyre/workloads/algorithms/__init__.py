"""Losses and advantages as pure functions of log-probs, rewards and values. No model, no back end."""
