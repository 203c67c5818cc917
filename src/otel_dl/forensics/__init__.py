"""What a process leaves behind however it ends: its status page, and what it tells.

`layout` says where in the page what stands, `writer` writes it, `reader` reads it (also when its writer is dead),
`folder` is where the pages of a run lie, `ends` how a worker ended, in words.
"""
