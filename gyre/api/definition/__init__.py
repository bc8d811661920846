"""A job as its user defines it, in Python or in a file: `RLJob`, its builder, and the classes that it names."""
