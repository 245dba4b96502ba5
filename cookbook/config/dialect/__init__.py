"""How the pinned TorchTitan names its options and writes its flags; a new stack rewrites this."""
