"""The door of a fleet: the HTTP routes by which clients ask the rollout manager for samples and publish policies."""
