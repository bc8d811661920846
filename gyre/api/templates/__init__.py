"""The files that `gyre init` writes, as they are written: they run where they are, too."""
