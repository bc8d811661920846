"""What passes between the rollout manager and its peers: typed frames, where to dial, and TLS."""
