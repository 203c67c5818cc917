"""Where spans leave the process: the sink, and the file of traces."""
