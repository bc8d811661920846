"""The way in for agents: sessions are handed out, and their turns asked for in the dialects of chat clients."""
