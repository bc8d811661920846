"""DLRover's helpers, as far as jobs use them."""
