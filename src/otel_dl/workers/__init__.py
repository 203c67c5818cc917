"""What runs inside a DataLoader worker, and the pipe through which it reports to its parent.

    parent: carrier (what a worker is given)  ──fork, or pickled──▶  worker: entry, loop, spans
    parent: relay  ◀──pipe, in the form of wire──  worker: writer

A worker starts no thread and exports nothing: what it has to say leaves by the pipe.
"""
