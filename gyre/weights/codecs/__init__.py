"""How fewer bytes go over the wire: encodings, deltas between versions, fp8, and the choice between them."""
