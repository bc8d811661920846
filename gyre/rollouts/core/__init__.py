"""The state of open groups: which instance has which sample, and how far each sample got. No sockets, no clock."""
