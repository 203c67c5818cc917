"""Reading traces back: from the files of a run to what a person wants to know about it."""
