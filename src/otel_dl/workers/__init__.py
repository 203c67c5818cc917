"""What runs inside a DataLoader worker, and the pipe through which it reports to its parent."""
