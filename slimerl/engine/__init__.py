"""SGLang from outside: start, stop and speak to its servers. `inside/` is what runs in the engine's own process."""
