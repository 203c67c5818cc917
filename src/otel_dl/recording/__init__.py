"""The hot path: what happened is written as tuples, kept or dropped when a step ends."""
