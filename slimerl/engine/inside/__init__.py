"""What runs inside an engine's processes: process entry, CPU shim, weight loader, digest. Needs torch alone.

Invariant: SGLang is used as it is installed; what must differ is set after import (`import_hooks`), in the engine's
own processes only.
"""
