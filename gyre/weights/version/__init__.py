"""One version of a policy's weights: its manifest, where its files lie, and their checksums."""
