"""What runs inside a DataLoader worker, and how it reports to its parent.

    parent: carrier (what a worker is given)  ──fork, or pickled──▶  worker: entry, loop, environment, spans
    parent: relay  ◀──memory behind its status page──  worker: ring     an ordinary fetch
    parent: relay  ◀──pipe, in the form of wire──  worker: writer       errors, the user's own spans

A worker starts no thread and exports nothing.
"""
