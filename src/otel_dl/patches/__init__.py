"""Where torch is patched: one module a target, each with `install(run, patches)`; `_patching` puts everything back."""
