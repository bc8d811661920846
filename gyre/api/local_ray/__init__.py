"""The Ray cluster that Gyre starts for itself: fewer processes of Ray's own, and workers that are forked, not begun."""
