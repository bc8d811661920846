"""Other systems' ways to write a job, each compiled to a job of Gyre's."""
