"""Multi-head latent attention: decode over paged caches of latent tokens."""
