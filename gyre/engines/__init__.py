"""Engines: what turns prompts into tokens, behind one HTTP dialect."""
