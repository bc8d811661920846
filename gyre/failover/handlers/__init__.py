"""What the coordinator decides for each kind of event: one module a subject. Pure."""
