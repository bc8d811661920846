"""The process of one vertex: its host, the messages it answers, membership, and how a hung process is found."""
