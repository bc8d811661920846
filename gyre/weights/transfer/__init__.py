"""How a version's bytes travel between machines: connections, servers, upload slots, receivers, transports."""
