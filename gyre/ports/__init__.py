"""What stands before every port that Gyre listens on: bounds of time, size and number for whoever dials in."""
