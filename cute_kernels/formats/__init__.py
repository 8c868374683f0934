"""The formats of weights and of KV caches, and the options that change attention's scores. Each is one object."""
