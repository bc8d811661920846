"""One file a revision, numbered; a released one is never changed."""
