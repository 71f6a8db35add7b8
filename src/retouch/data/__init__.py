"""Examples from files: formats, the group sampler, validation. No torch."""
