"""The other ranks of the job: who they are, what they do, and which of them is missing.

Everything here runs in one background thread, over a connection of its own to the job's store; a thread that trains
only leaves word, and waits for an answer where a failure is to be explained.
"""
